"""Flags that name files and folders."""

from absl import flags

from launch.flags.paths import define_path


def test_a_home_folder_is_expanded_where_the_shell_does_not(monkeypatch):
    values = flags.FlagValues()
    define = flags.DEFINE
    monkeypatch.setattr(flags, "DEFINE", lambda *given, **more: define(*given, values, **more))
    monkeypatch.setenv("HOME", "/home/someone")
    define_path("directory", None, "A folder.")
    values(["program", "--directory=~/runs/a~b"])
    assert values.directory == "/home/someone/runs/a~b"
    assert values["directory"].serialize() == "--directory=/home/someone/runs/a~b"
