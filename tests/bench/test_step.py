"""`tokring bench step`: the workload does what it says, and the ratios come from its rows."""

import pytest

from tokring.bench.step import Workload, measure
from tokring.bench.step_command import named_ratios


@pytest.mark.parametrize("churn", [False, True])
def test_so_many_requests_run_at_each_step(churn):
    row = measure(Workload(num_running=16, churn=churn, num_steps=80))
    assert row["running"] == pytest.approx(16, abs=1)
    assert 0 < sum(row["phases_us"].values()) and row["p50_us"] <= row["p99_us"]


def test_the_ratio_to_vllm_is_absent_where_it_was_not_measured():
    rows = [
        {"engine": "tokring", "load": "churn", "batch": batch, "p50_us": us, "cpu_us": us}
        for batch, us in ((256, 100.0), (1024, 176.8))
    ]
    assert named_ratios(rows) == {"vs_vllm": None, "growth_us_per_request": 0.1}
    rows.append({"engine": "vllm", "load": "churn", "batch": 256, "p50_us": 5000.0, "cpu_us": 4000.0})
    assert named_ratios(rows)["vs_vllm"] == 40.0
