import os
import threading

import pytest

from flwr_privacy.wire import files
from flwr_privacy.wire.files import (
    DamagedFileError,
    exclusive_lock,
    locked_file,
    read_checksummed,
    write_checksummed,
)

MAGIC = b"example 1\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sealed"


@pytest.mark.parametrize("payload", [b"", b"content\n\x00\xff", bytes(100_000)])
@pytest.mark.parametrize("durable", [True, False])
def test_what_was_written_is_read(path, payload, durable):
    for content in (b"older and longer" * 10_000, payload):
        write_checksummed(path, MAGIC, content, durable=durable)
    assert read_checksummed(path, MAGIC) == payload
    assert [file.name for file in path.parent.iterdir()] == ["sealed"]


def test_only_the_owner_may_read_a_file(path):
    write_checksummed(path, MAGIC, b"content", durable=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_change_of_a_byte_is_noticed(path):
    write_checksummed(path, MAGIC, b"content", durable=False)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedFileError):
                read_checksummed(path, MAGIC)


def test_every_truncation_and_an_extension_are_noticed(path):
    write_checksummed(path, MAGIC, b"content", durable=False)
    whole = path.read_bytes()
    for content in [whole[:length] for length in range(len(whole))] + [whole + b"\n"]:
        path.write_bytes(content)
        with pytest.raises(DamagedFileError):
            read_checksummed(path, MAGIC)


def test_a_file_of_another_kind_is_refused(path):
    write_checksummed(path, b"another 1\n", b"content", durable=False)
    with pytest.raises(DamagedFileError, match="does not begin with 'example 1'"):
        read_checksummed(path, MAGIC)


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    write_checksummed(path, MAGIC, b"old", durable=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_checksummed(path, MAGIC, b"new", durable=True)
    assert read_checksummed(path, MAGIC) == b"old"
    write_checksummed(path, MAGIC, b"new", durable=True)
    assert read_checksummed(path, MAGIC) == b"new"


def test_only_a_durable_write_waits_for_the_disk(path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    write_checksummed(path, MAGIC, b"content", durable=False)
    assert not flushed
    write_checksummed(path, MAGIC, b"content", durable=True)
    assert len(flushed) == 2  # the file and its folder


def test_a_lock_has_one_holder_at_a_time(path):
    holders, most = [], []

    def work():
        for _ in range(50):
            with exclusive_lock(path, timeout=60):
                holders.append(1)
                most.append(len(holders))
                threading.Event().wait(1e-4)
                holders.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 200


def test_a_locked_file_that_is_removed_or_replaced_has_one_holder_at_a_time(path):
    holders, most, content = [], [], b""

    def work(own: int):
        nonlocal content
        for count in range(50):
            with locked_file(path, timeout=60) as descriptor:
                holders.append(1)
                most.append(len(holders))
                assert os.pread(descriptor, 1000, 0) == content
                threading.Event().wait(1e-4)
                if (own + count) % 3 == 0:  # as who converts a ledger does, who does no more then
                    content += b"x"
                    other = path.with_name(f"{own}.new")
                    other.write_bytes(content)
                    holders.pop()
                    os.replace(other, path)
                    continue
                if (own + count) % 3 == 1:
                    content = b""
                    os.ftruncate(descriptor, 0)
                holders.pop()

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 200
    assert not path.exists() or path.read_bytes() == content != b""


def test_a_file_that_stays_empty_is_removed_and_another_in_its_place_is_not(path):
    with locked_file(path, timeout=0):
        assert path.read_bytes() == b""
    assert not path.exists()
    with locked_file(path, timeout=0):
        path.unlink()
        path.touch()
    assert path.exists()
    with locked_file(path, timeout=0) as descriptor:
        os.pwrite(descriptor, b"kept", 0)
        with (
            pytest.raises(TimeoutError, match=r"waited 0 s"),
            locked_file(path, timeout=0),
        ):
            pass
    assert path.read_bytes() == b"kept"


def test_a_lock_that_stays_taken_is_named_and_one_that_is_left_can_be_had(path):
    with exclusive_lock(path, timeout=0):
        with (
            pytest.raises(TimeoutError, match=r"locked by another process \(waited 0.01 s\)"),
            exclusive_lock(path, timeout=0.01),
        ):
            pass
        with pytest.raises(TimeoutError), exclusive_lock(path, timeout=0):
            pass
    with pytest.raises(KeyError), exclusive_lock(path, timeout=0):
        raise KeyError
    with exclusive_lock(path, timeout=0):
        pass


def test_a_copy_of_the_lock_in_a_forked_process_does_not_hold_it(path, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    with exclusive_lock(path, timeout=0):
        copy = os.dup(opened[0])  # as a fork does
    try:
        with exclusive_lock(path, timeout=0):
            pass
    finally:
        os.close(copy)


def test_a_platform_without_locks_is_named(path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with (
        pytest.raises(OSError, match="this platform has no fcntl"),
        exclusive_lock(path, timeout=0),
    ):
        pass
