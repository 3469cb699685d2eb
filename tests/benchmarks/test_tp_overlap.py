"""The link bed, and the conversion of its measurements into metrics."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from benchmarks import linkbed
from benchmarks.linkbed import LinkBed, LinkBedError
from benchmarks.tp_overlap import hidden, hidden_of_chunks, metrics, picture
from benchmarks.tp_overlap.job import require_same_losses
from benchmarks.tp_overlap.trace import Span

HERE = "tests.benchmarks.test_tp_overlap"


def cell(transfer=60.0, matmul=50.0, stock=110.0, overlapped=70.0):
    times = {"transfer": transfer, "matmul": matmul, "stock": stock, "overlapped": overlapped}
    times["transfer in chunks"] = 0.8 * transfer
    return {
        "milliseconds": {**times, "2": 80.0, "4": 75.0, "8": 60.0},
        "m_k_n": [4, 2, 3],
        "chunks": 4,
    }


def test_hidden_fraction():
    assert hidden(cell(), "stock") == 0
    assert hidden(cell(), "overlapped") == pytest.approx(0.8)
    assert hidden(cell(), "8") == 1
    assert hidden(cell(overlapped=20.0), "overlapped") == 1, "clipped"
    assert hidden(cell(overlapped=160.0), "overlapped") == -1, "a loss is not hidden"


def test_no_hidden_fraction_where_transfer_and_matmul_are_not_about_as_long():
    for transfer in (39.0, 64.0):
        said = hidden(cell(transfer=transfer), "overlapped")
        assert f"transfer took {transfer / 50:.2f} of the matmul's time, not 0.8 to 1.25" in said
    assert hidden(cell(transfer=48.0), "overlapped") == pytest.approx((48 + 50 - 70) / 48)
    assert "transfer took 0.77 of" in hidden_of_chunks(cell(transfer=48.0)), "0.8 of that in chunks"


@pytest.mark.parametrize("last", [3.0 + 1e-5, float("nan")])
def test_another_training_is_not_timed(last):
    assert require_same_losses({"stock": [4.0, 3.0], "overlapped": [4.0, 3.0 + 1e-6]}) < 1e-6
    with pytest.raises(RuntimeError, match="losses of the main job differ"):
        require_same_losses({"stock": [4.0, 3.0], "overlapped": [4.0, last]})


def test_metrics():
    cells = {layer: {"forward": cell(), "backward": cell(overlapped=85.0)} for layer in ("column", "row")}
    pair = {"milliseconds": cell()["milliseconds"], "chunks": {}}
    slow = {
        "cells": cells,
        "pair": pair,
        "deviation": 1e-8,
        "reduce_scatter": {"torch": 4.0, "platform": 2.0},
    }
    over_loopback = {"stock": 50.0, "overlapped": 51.0, "2": 60.0, "4": 45.0, "8": 50.0}
    fast = {"pair": {"milliseconds": over_loopback, "chunks": {}}, "deviation": 2e-8}
    result = metrics("2gbit", slow, fast, {"step_time_ratio": 0.9})
    json.dumps(result)
    assert result["hidden_fraction"]["row"] == {"forward": pytest.approx(0.8), "backward": pytest.approx(0.5)}
    assert result["hidden_fraction_stock"]["column"]["forward"] == 0
    assert result["hidden_fraction_fixed"]["8"]["column"]["backward"] == 1
    assert result["transfer_in_chunks"]["row"]["forward"] == pytest.approx(0.8)
    assert result["hidden_fraction_of_chunks"]["row"]["forward"] == pytest.approx((48 + 50 - 70) / 48)
    assert result["layer_speedup"] == pytest.approx(110 / 70)
    assert result["loopback_ratio"] == pytest.approx(1.02)
    assert result["loopback_ratio_fixed"]["4"] == pytest.approx(0.9)
    assert result["reduce_scatter_gain"] == 2
    assert result["milliseconds_reduce_scatter"] == {"torch": 4000, "platform": 2000}
    assert result["transfer_over_matmul"]["row"]["forward"] == pytest.approx(1.2)
    assert result["transfer_over_matmul_pair"] == pytest.approx(1.2)
    assert result["correctness_deviation"] == 2e-8


def where(fail=None):
    """Return the rank, a sum over ranks, the cores, the threads, and the network devices."""
    import socket

    import torch
    import torch.distributed as dist

    if dist.get_rank() == fail:
        raise ValueError("this rank has had enough")
    ones = torch.ones(3)
    dist.all_reduce(ones)
    devices = {name for _, name in socket.if_nameindex()}
    return dist.get_rank(), ones.tolist(), sorted(os.sched_getaffinity(0)), torch.get_num_threads(), devices


@pytest.mark.full
def test_ranks_over_loopback():
    with LinkBed(2, None, cores=[0, 0]) as bed:
        for number, (rank, ones, cores, threads, _) in enumerate(bed.run(f"{HERE}:where", timeout_s=120)):
            assert (rank, ones, cores, threads) == (number, [2.0] * 3, [0], 1)
        with pytest.raises(LinkBedError, match=r"(?s)where failed or did not finish.*rank 1.*has had enough"):
            bed.run(f"{HERE}:where", timeout_s=120, fail=1)


@pytest.mark.full
def test_ranks_over_links():
    """Available links are used and removed again; otherwise the message names the missing part."""
    possible = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    if possible:
        with LinkBed(3, "400mbit", cores=[0, 0, 0]) as bed:
            for rank, ones, _, _, devices in bed.run(f"{HERE}:where", timeout_s=120):
                assert (rank, ones) == (rank, [3.0] * 3)
                assert {"lo", "slow0"} <= devices
            assert f"linkbed{os.getpid()}" in linkbed._run("ip", "netns", "list")
        assert f"linkbed{os.getpid()}" not in linkbed._run("ip", "netns", "list")
    else:
        with pytest.raises(LinkBedError, match=r"root|iproute2"):
            LinkBed(2, "2gbit", cores=[0, 0]).__enter__()


def test_links_that_cannot_be_had(monkeypatch):
    with pytest.raises(LinkBedError, match="'fast' is not a rate; write 2gbit"):
        LinkBed(2, "fast")
    with pytest.raises(LinkBedError, match="17 ranks were requested; use 2 to 16"):
        LinkBed(17)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    with pytest.raises(LinkBedError, match="2 ranks need a core each and this process may use 1"):
        LinkBed(2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkBedError, match="need root"):
        linkbed.require_tools()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LinkBedError, match="tc not found; apt-get install iproute2"):
        linkbed.require_tools()


def test_trace_and_picture(tmp_path):
    spans = [Span("matmul", "matmul", 10.0, 10.002), Span("all-gather", "transfer 1", 10.001, 10.004)]
    recorded = [{"stock": spans, "overlapped": spans}] * 2
    picture.write(recorded, tmp_path / "step.json", "a layer")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    gathers = [event for event in events if event["name"] == "all-gather"]
    assert len(gathers) == 4
    assert len({event["pid"] for event in gathers}) == 4
    assert (gathers[0]["ts"], gathers[0]["dur"]) == (1000.0, 3000.0)
    assert (tmp_path / "step.png").stat().st_size > 5000
