"""Credentials are hidden wherever they occur; texts that help to find a fault are shown."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.health.credentials import HIDDEN, Credentials, names_a_secret
from launch.health.report import as_json, as_text, without_credentials
from launch.health.section import Section
from launch.health.variables import variables

SECRET = "Xq7/+w@ d:\"k'%2=é"

# Texts that contain a credential in place of {}.
PATTERNS = (
    "https://user:{}@host/path",
    "https://{}@host",
    "user:{}@host:2222",
    "gs://bucket/run?X-Goog-Signature={}",
    "https://host/data?sig={}&x=1",
    "host/data?a=1&se={}",
    "--xla_api_key={}",
    "--flag=1 --auth-token {} --other",
    "password={}",
    "PASSWORD = '{}'",
    "client_secret: {}",
    "key: {}",
    "x;AccountKey={};y",
    '{{"token": "{}"}}',
    "{{'db_password': {}}}",
    '{{\\"credential\\": \\"{}\\"}}',
    "Authorization: Bearer {}",
    "authorization=Basic {}",
    "bearer {}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "cookie:{}",
)


@pytest.mark.parametrize("secret", [SECRET, "horse", "12345"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_with_a_credential_is_hidden_completely(pattern, secret):
    assert Credentials().shown(pattern.format(secret)) == HIDDEN


@pytest.mark.parametrize(
    "text",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "run with ghp_0123456789abcdefABCDEF",
        "hf_abcdefghijklmnop",
        "glpat-abcdefghijklmnop",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    ],
)
def test_known_formats_of_tokens_are_hidden(text):
    assert Credentials().shown(text) == HIDDEN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/data/tokenizer/run",
        "--xla_gpu_autotune_level=2 --xla_dump_to=/tmp/x",
        json.dumps({"cluster": {"worker": ["auth-0.auth:2222", "10.0.0.1:2222"]}, "task": {"index": 0}}),
        "worker:1 at key-1.key:2222, refused; its machine answers, but nothing listens on this port",
        "2(x3)",
        "[::1]:2222",
        "gs://bucket/run",
        "node[01-04]",
        "/usr/local/cuda-12.5:/opt/nccl",
        "kim@example.org",
    ],
)
def test_a_text_without_a_credential_is_shown(text):
    assert Credentials().shown(text) == text


SUSPICIOUS_NAMES = "API_KEY TOKEN SECRET JWT PASSWORD db_passwd CREDENTIALS AUTH AWS_SIGNATURE COOKIE PRIVATE"


@pytest.mark.parametrize("name", SUSPICIOUS_NAMES.split())
def test_values_of_variables_with_suspicious_names_are_hidden(name):
    assert names_a_secret(name)
    assert variables({f"TF_{name}": SECRET}).facts == {f"TF_{name}": HIDDEN}


@pytest.mark.parametrize(
    "name", ["TF_CONFIG", "KERAS_BACKEND", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "XLA_FLAGS"]
)
def test_values_of_variables_with_other_names_are_shown(name):
    assert not names_a_secret(name)
    assert variables({name: "value"}).facts == {name: "value"}


def test_only_variables_with_known_prefixes_are_shown():
    assert variables({"HOME": "/root", "NCCL_DEBUG": "INFO", "MY_TF_X": "1"}).facts == {"NCCL_DEBUG": "INFO"}


def test_a_known_value_is_hidden_in_any_text():
    """The report does not show DB_PASSWORD; its value is hidden where another text contains it."""
    credentials = Credentials.of_environment({"DB_PASSWORD": "correcthorse", "PIN_TOKEN": "123"})
    assert credentials.shown("--x=correcthorse1") == HIDDEN
    assert credentials.shown("port 1234") == "port 1234", "a value of three letters is too short to search for"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["a" * 300_000, "a:" * 150_000, "?a" * 150_000, "key" * 20_000, "'a" * 150_000])
def test_long_texts_are_searched_quickly(text):
    assert Credentials().shown(text) == text


letters = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=6)


@pytest.mark.full
@settings(deadline=None)
@given(secret=letters, pattern=st.sampled_from(PATTERNS), before=st.text(max_size=9), after=st.text(max_size=9))
def test_no_part_of_a_credential_is_shown(secret, pattern, before, after):
    """A fact, a list's item, a problem and a variable with a suspicious name; as text and as JSON."""
    text = before + pattern.format(secret) + after
    environment = {"TF_X": text, "TF_X_TOKEN": secret, "NCCL_Y": f"a{secret}b"}
    credentials = Credentials.of_environment(environment)
    section = Section(
        facts={"one": text, "several": ["good", text], **variables(environment).facts},
        problems=(text, "bad; fix it"),
    )
    report = {"cluster": without_credentials("cluster", section, credentials)}
    facts = report["cluster"].facts
    assert facts == {"one": HIDDEN, "several": ["good", HIDDEN], **dict.fromkeys(environment, HIDDEN)}
    assert report["cluster"].problems[1] == "bad; fix it"
    assert report["cluster"].problems[0].startswith("cluster: a problem is hidden")
    assert json.loads(as_json(report))["facts"]["cluster"] == facts
    assert as_text(report).count(HIDDEN) == 6
