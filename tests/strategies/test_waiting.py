"""Waiting for the processes of a cluster: which missing ones the error names."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest

from strategies import waiting
from strategies.cluster import Member
from strategies.errors import PeerLost
from strategies.servers.wire import MAGIC
from strategies.waiting import listening, listens, wait_for_all
from tests.strategies.addresses import FAMILIES, free, server
from tests.towers.user_errors import refused
from towers.errors import UserError

WAIT_SECONDS = 20


class TestAddresses:
    @pytest.mark.parametrize("host", FAMILIES)
    def test_listening_on_a_free_address(self, host):
        address = free(host)
        with listening(Member("worker", 1, address)):
            assert listens(address)
        assert not listens(address)

    @pytest.mark.parametrize("host", FAMILIES)
    def test_listening_on_a_taken_address_is_refused(self, host):
        with server(host) as address:
            assert listens(address)
            port = address.rpartition(":")[2]
            with refused(f"worker:1: cannot listen on port {port} of {address}", "in use", "choose another port"):
                listening(Member("worker", 1, address))

    def test_listening_on_an_address_that_was_used_a_moment_ago(self):
        """The kernel remembers a connection that the server closed for a minute."""
        with socket.create_server(("127.0.0.1", 0)) as before:
            with socket.create_connection(before.getsockname()) as client:
                before.accept()[0].close()
                assert client.recv(1) == b""
            address = f"127.0.0.1:{before.getsockname()[1]}"
        listening(Member("worker", 0, address)).close()

    def test_an_unknown_host_does_not_listen(self):
        assert not listens("no-such-host.invalid:2222")

    def test_a_host_name_works_like_its_ip_address(self):
        with server() as address:
            assert listens(address.replace("127.0.0.1", "localhost"))


def waited_for(addresses, seconds) -> None:
    """Lets a worker at a free address wait for other workers at `addresses`."""
    others = [Member("worker", index, address) for index, address in enumerate(addresses, start=1)]
    wait_for_all(Member("worker", 0, free()), others, seconds)


class TestWaiting:
    def test_only_those_that_never_listened_are_named(self):
        missing, second = free(), free()
        with server() as there, pytest.raises(PeerLost) as raised:
            waited_for([there, missing, second], 0.3)
        message = str(raised.value)
        assert message.startswith(f"worker:2 ({missing}), worker:3 ({second}) did not start within ")
        assert "startup_timeout_seconds=0.3: " in message
        assert "TF_CONFIG" in message

    def test_a_late_worker_is_waited_for(self):
        address = free()
        host, port = address.split(":")
        late = threading.Timer(0.5, lambda: opened.append(socket.create_server((host, int(port)))))
        opened: list[socket.socket] = []
        late.start()
        began = time.monotonic()
        waited_for([address], WAIT_SECONDS)
        assert time.monotonic() - began > 0.4
        opened[0].close()

    def test_two_waiting_workers_find_each_other(self):
        """A worker that has found the other one keeps listening on its address, as TensorFlow's server does."""
        members = [Member("worker", index, free()) for index in (0, 1)]
        both = threading.Barrier(2, timeout=WAIT_SECONDS)

        def join(rank):
            wait_for_all(members[rank], [members[1 - rank]], WAIT_SECONDS)
            with listening(members[rank]):
                both.wait()

        other = threading.Thread(target=join, args=[1])
        other.start()
        join(0)
        other.join(WAIT_SECONDS)
        assert not other.is_alive()

    @pytest.mark.timeout(60)
    def test_a_slow_probe_does_not_delay_the_deadline(self, monkeypatch):
        """A probe is slow for example if a machine drops packets."""
        monkeypatch.setattr(waiting, "listens", lambda address: time.sleep(0.1))
        with pytest.raises(PeerLost):
            waited_for([free()] * 3, 0.5)


class TestWords:
    """Waiting processes tell each other a word, such as their engine's name; the words must be equal."""

    @staticmethod
    def both_wait(words) -> list[Exception | None]:
        """The errors of two processes that wait for each other, each with its own word; None without an error."""
        members = [Member("ps", index, free()) for index in (0, 1)]
        ended = [threading.Event(), threading.Event()]

        def wait(rank):
            try:
                wait_for_all(members[rank], [members[1 - rank]], WAIT_SECONDS, word=words[rank])
            except (PeerLost, UserError) as error:
                return error
            finally:
                ended[rank].set()
            # The other process may not have looked yet: TensorFlow's server listens next, and sends this byte.
            with listening(members[rank]) as listener, waiting._Doorkeeper(listener, "\0", MAGIC):
                ended[1 - rank].wait(WAIT_SECONDS)
            return None

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(wait, (0, 1)))

    @pytest.mark.timeout(60)
    def test_the_same_word(self):
        assert self.both_wait(["tensorflow", "tensorflow"]) == [None, None]

    @pytest.mark.timeout(60)
    def test_a_process_that_says_nothing_is_named(self, monkeypatch):
        monkeypatch.setattr(waiting, "_SILENT_SECONDS", 0.3)
        monkeypatch.setattr(waiting, "_ANSWER_SECONDS", 0.2)
        with server() as silent, refused("worker:1", silent, "does not use engine='tensorflow'"):
            wait_for_all(
                Member("worker", 0, free()), [Member("worker", 1, silent)], WAIT_SECONDS, word="tensorflow"
            )

    @pytest.mark.full
    @pytest.mark.timeout(60)
    def test_a_client_of_tensorflow_s_server_is_no_stranger(self):
        """A chief that has found all processes connects while a slower one still looks for the last."""
        here, last, over = Member("ps", 0, free()), Member("ps", 1, free()), threading.Event()

        def connect_then_listen():
            while not listens(here.address):
                time.sleep(0.02)
            host, port = here.address.split(":")
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                client.recv(100)
                time.sleep(2 * waiting._PROBE_SECONDS)
            with listening(last) as listener, waiting._Doorkeeper(listener, "tensorflow", MAGIC):
                over.wait(WAIT_SECONDS)

        other = threading.Thread(target=connect_then_listen)
        other.start()
        try:
            wait_for_all(here, [last], WAIT_SECONDS, word="tensorflow")
        finally:
            over.set()
            other.join(WAIT_SECONDS)

    @pytest.mark.timeout(60)
    def test_a_process_of_the_other_kind_is_noticed(self, monkeypatch):
        """Because it connects again and again."""
        monkeypatch.setattr(waiting, "_INSISTS_SECONDS", 0.5)
        here, over = Member("ps", 0, free()), threading.Event()

        def speak():
            while not over.is_set():
                with contextlib.suppress(OSError), connected_to(here) as other:
                    # A time limit, because the listener at the end says nothing.
                    other.settimeout(1)
                    other.sendall(MAGIC + b"and more")
                    other.recv(100)

        speaker = threading.Thread(target=speak)
        speaker.start()
        with refused("ps:0: a process connected that does not use engine='tensorflow'"):
            wait_for_all(here, [Member("ps", 1, free())], WAIT_SECONDS, word="tensorflow", other_kind=MAGIC)
        over.set()
        # The speaker can't end before somebody listens.
        with listening(here):
            speaker.join(WAIT_SECONDS)

    @pytest.mark.timeout(60)
    def test_strangers_neither_end_the_wait_nor_prolong_it(self):
        """A port scanner, a health probe, an idle client: whatever they send, and however many they are."""
        here, last = Member("ps", 0, free()), Member("ps", 1, free())
        said = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"TOW", b"", bytes(range(256)), MAGIC * 9)
        with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as opened:
            waited = pool.submit(wait_for_all, here, [last], WAIT_SECONDS, word="tensorflow", other_kind=MAGIC)
            for each in said:
                opened.enter_context(connected_to(here)).sendall(each)
            idle = [opened.enter_context(connected_to(here)) for _ in range(20)]
            began = time.monotonic()
            idle[-1].settimeout(WAIT_SECONDS)
            assert idle[-1].recv(100) == b"tensorflow" and time.monotonic() - began < 1
            # Long enough for the waiting process to read what the strangers sent.
            time.sleep(4 * waiting._PROBE_SECONDS)
            assert not waited.done()
            with listening(last) as listener, waiting._Doorkeeper(listener, "tensorflow", MAGIC):
                waited.result()

    @pytest.mark.full
    @pytest.mark.timeout(60)
    def test_more_connections_than_the_kernel_keeps(self):
        """Each of many workers looks whether this one listens; the last one must find it too."""
        here, last = Member("worker", 0, free()), Member("worker", 1, free())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waited = pool.submit(wait_for_all, here, [last], WAIT_SECONDS)
            connected_to(here).close()
            # A worker that is not accepted at once tries again.
            for _ in range(2 * waiting._KEPT_CONNECTIONS):
                connected_to(here).close()
            with listening(last):
                waited.result()


def connected_to(member: Member) -> socket.socket:
    """A connection, as soon as the member listens."""
    while not listens(member.address):
        time.sleep(0.02)
    host, port = member.address.split(":")
    return socket.create_connection((host, int(port)))
