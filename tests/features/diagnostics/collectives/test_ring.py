"""Connections from rank to rank: who ends unasked is known to all others, who leaves is missed by nobody.

Neither is a stranger who connects and goes, or another process that has a rank's port by now.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket

import pytest
import torch.distributed as dist

from mindspeed_dsa.features.diagnostics.collectives.ring import Ring, boot

WHERE = {"host": "host", "boot": boot(), "pid": 101, "address": "127.0.0.1"}


@pytest.fixture
def rings():
    """Four ranks that are connected; the machine of rank 2 is another one."""
    store = dist.HashStore()
    made = [Ring(store, "job", rank, 4, f"host-{rank == 2}", 100 + rank) for rank in range(4)]
    for ring in made:
        ring.connect()
    yield made
    for ring in made:
        ring.close()


def hear(rings):
    """What each rank hears, once nothing is on its way any more."""
    heard = [{} for _ in rings]
    for _ in range(50):
        for rank, ring in enumerate(rings):
            ready = select.select(ring.waited_for(), [], [], 0.002)[0] if ring.waited_for() else []
            if news := ring.listen(ready):
                heard[rank].update(news)
                ring.tell(heard[rank])
    return heard


def test_all_others_hear_of_a_rank_that_has_ended(rings):
    assert hear(rings) == [{}] * 4
    rings.pop(2).close()  # without a word, as the kernel does it
    gone = {"2": "process 102 on host-True has ended, or cannot be reached any more"}
    assert hear(rings) == [gone] * 3


def test_a_rank_that_fails_says_why(rings):
    hear(rings)
    failed = rings.pop(1)
    failed.tell({"1": "it failed with ValueError: a bad batch"})
    failed.leave()
    assert hear(rings) == [{"1": "it failed with ValueError: a bad batch"}] * 3


def test_ranks_that_leave_are_not_missed(rings):
    hear(rings)
    rings.pop(3).leave()
    rings.pop(0).leave()
    assert hear(rings) == [{}] * 2


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.0\r\n\r\n", b"job from 1\n", b"job from 0 \n"])
def test_strangers_who_connect_and_go_end_no_job(rings, words):
    hear(rings)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", rings[1]._door.getsockname()[1])) as stranger:
            stranger.sendall(words)
    assert hear(rings) == [{}] * 4
    rings.pop(1).close()
    gone = {"1": "process 101 on host-False has ended, or cannot be reached any more"}
    assert hear(rings) == [gone] * 3


def test_strangers_who_stay_keep_no_rank_out():
    store = dist.HashStore()
    made = [Ring(store, "job", rank, 2, "host", 100 + rank) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            address = ("127.0.0.1", made[1]._door.getsockname()[1])
            stack.enter_context(socket.create_connection(address)).sendall(b"job")
        made[0].connect()
        assert hear(made) == [{}] * 2
        made.pop(1).close()
        assert hear(made) == [{"1": "process 101 on host has ended, or cannot be reached any more"}]
    made[0].close()


def test_a_rank_that_leaves_while_another_connects_to_it_is_not_missed():
    store = dist.HashStore()
    first, second = (Ring(store, "job", rank, 2, "host", 100 + rank) for rank in range(2))
    first.connect()
    second.leave()  # before it has seen who is at its door
    assert hear([first]) == [{}]
    first.close()


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b'{"1": "it failed"}\n', b"job from 0\n"])
def test_a_stranger_with_a_ranks_address_is_not_the_rank(words):
    store = dist.HashStore()
    first = Ring(store, "job", 0, 2, "host", 100)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = {**WHERE, "port": other.getsockname()[1]}
        store.set("mindspeed_dsa/ring/job/1", json.dumps(where))
        first.connect()
        with other.accept()[0] as accepted:
            accepted.sendall(words)
            assert hear([first]) == [{}]
        assert hear([first]) == [{}]
    second = Ring(store, "job", 1, 2, "host", 101)  # it has an address of its own at last
    first.connect()
    assert hear([first, second]) == [{}] * 2
    second.close()
    assert hear([first]) == [{"1": "process 101 on host has ended, or cannot be reached any more"}]
    first.close()


def test_who_cannot_be_reached_is_told_once():
    store = dist.HashStore()
    first = Ring(store, "job", 0, 2, "host", 100)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = {**WHERE, "port": closed.getsockname()[1]}
    store.set("mindspeed_dsa/ring/job/1", json.dumps(where))
    told = 0
    for _ in range(20):
        try:
            first.connect()
        except OSError:
            told += 1
    assert told == 1
    first.close()


def test_machines_of_one_name_are_told_apart(monkeypatch):
    """Many are called ``localhost``, where the port of another one may be anybody's."""
    store, asked = dist.HashStore(), []
    first = Ring(store, "job", 0, 2, "localhost", 100)
    for machine in (boot(), "another"):
        where = {**WHERE, "host": "localhost", "boot": machine, "address": "192.0.2.1", "port": 9}
        store.set("mindspeed_dsa/ring/job/1", json.dumps(where))

        def connect(address, timeout):
            asked.append(address[0])
            raise ConnectionRefusedError

        monkeypatch.setattr(socket, "create_connection", connect)
        first.connect()
    assert asked == ["127.0.0.1", "192.0.2.1"]
    first.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ranks_are_reached_by_ipv6():
    rank = Ring(dist.HashStore(), "job", 0, 2, "host", 100)
    try:
        socket.create_connection(("::1", rank._door.getsockname()[1]), timeout=5).close()
    except OSError as error:
        if error.errno == 99:  # EADDRNOTAVAIL: the loopback device has none
            pytest.skip("the machine has no IPv6 address")
        raise
    finally:
        rank.close()
