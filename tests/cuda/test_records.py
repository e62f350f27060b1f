"""Records of kernels that were measured elsewhere: their keys, and the device that they are for."""

import json
from contextlib import closing
from dataclasses import replace

import pytest

from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.cli import main
from korch.cuda.measure import job as jobs
from korch.cuda.measure.device import CALIBRATION, to_text
from korch.cuda.target import NOMINAL
from korch.errors import OptionError, UnsupportedError
from korch.measure.database import Database
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.records import plain
from tests.cuda.cuda_groups import product

triton = pytest.importorskip("triton")
DEVICE = replace(
    NOMINAL[90], name="NVIDIA H200", versions=("torch 2", f"triton {triton.__version__}"), is_nominal=False
)


def candidate_of(meter):
    group = product("f32[64,64]", "f32[64,64]")
    provider = next(p for p in meter.providers if p.name == "triton-product")
    return Candidate(group, provider.name, provider.offer(group, meter.target)[0], provider.version)


def describe(folder, device=DEVICE):
    with closing(Database(folder, device.fingerprint, fields=json.dumps(plain(device)))) as database:
        database.put_fact(CALIBRATION, to_text(replace(device, launch_ns=700)))


def test_a_record_belongs_to_the_printed_kernel(tmp_path):
    describe(tmp_path)
    with open_meter(Options(target="cuda:sm_90", cache_folder=tmp_path)) as meter:
        candidate = candidate_of(meter)
        key = jobs.job_key(meter.job(candidate, meter.kernel(candidate)))
        assert meter.record_key(candidate.key) == key and meter.known(candidate) is None
    with closing(Database(tmp_path, DEVICE.fingerprint)) as database:
        database.put_record(key, Measured(7, (7,)))
    options = Options(target="cuda:h200", cache_folder=tmp_path)
    with open_meter(options) as meter:
        assert meter.target.launch_ns == NOMINAL[90].launch_ns and meter.rated.launch_ns == 700
        moved = replace(candidate, version="of other sources")
        assert [meter.known(c) for c in (candidate, moved)] == [Measured(7, (7,)), None]
        meter.kernel(moved)
        assert meter.known(moved) == Measured(7, (7,))
        other = replace(candidate, offer=replace(candidate.offer, variant="direct"))
        assert meter.measure([other]) == [None]
        meter.only_known = True
        assert meter.measure([other]) == [Failed("late", "it was not measured on the device")]
    with open_meter(replace(options, precision="tf32")) as meter:
        assert meter.record_key(candidate.key) == candidate.key  # the option may print another kernel


def test_the_key_follows_the_functions_that_are_called(monkeypatch):
    def called(text):
        return jobs._called([text])

    before = [called("f.tanh(x)"), called("f.larger(a, b)"), called("x + 1")]
    known = {**jobs._functions(), "tanh": "def tanh(x): return larger(x, 1)"}
    monkeypatch.setattr(jobs, "_functions", lambda: known)
    assert called("f.tanh(x)") != before[0] and [called("f.larger(a, b)"), called("x + 1")] == before[1:]
    second = called("f.tanh(x)")
    known["larger"] = "def larger(a, b): return b"
    assert called("f.tanh(x)") != second


def test_only_recorded_devices_are_targets(tmp_path, capsys):
    with pytest.raises(OptionError, match="no device called 'h200' is recorded"):
        open_meter(Options(target="cuda:h200", cache_folder=tmp_path))
    describe(tmp_path, replace(DEVICE, versions=("triton 1.0",)))
    with pytest.raises(UnsupportedError, match=r"compiled with other versions \(triton 1.0\)"):
        open_meter(Options(target="cuda:h200", cache_folder=tmp_path))
    assert main(["database", "stats", "--cache-folder", str(tmp_path)]) == 0
    assert "--target 'cuda:NVIDIA H200': triton 1.0" in capsys.readouterr().out
