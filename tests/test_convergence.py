"""The convergence run at toy sizes: the schedules pass its verdict, planted faults do not."""

import json
import math
from functools import partial

import pytest
import torch

from benchmarks import byte_pairs, convergence
from benchmarks.convergence import MATERIALIZED, Run

TINY = byte_pairs.TINY


@pytest.fixture(scope="module")
def materialized():
    return convergence.train_all(TINY, convergence.materialized_runs(orders=1, parts=(2,)), "cpu")


@pytest.fixture
def verdict(materialized):
    """Of one run that trains with `loss`."""

    def judged(loss):
        records = convergence.train_all(TINY, {"run": Run(loss)}, "cpu")
        return convergence.judge(TINY, materialized | records)["run"]

    return judged


def past(verdict):
    """The measures that found the run out."""
    return {name for name, found in verdict["measures"].items() if not found["distance"] <= found["limit"]}


def test_schedules_are_within(cce, verdict):
    for schedule in cce.planner.SCHEDULES:
        found = verdict(partial(cce.linear_cross_entropy, schedule=schedule))
        assert found["within"], (schedule, found)


NORM_DC, NORM_OTHERS = "log norm of dC, first step", "log norm of the others, first step"


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is too small."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.9 * gradient


def test_too_small_gradients_are_found(cce, verdict):
    """In the norms: AdamW's own steps do not depend on the scale."""
    found = verdict(lambda e, c, y: Scaled.apply(cce.linear_cross_entropy(e, c, y)))
    assert {NORM_DC, NORM_OTHERS} <= past(found)
    found = verdict(lambda e, c, y: cce.linear_cross_entropy(Scaled.apply(e), c, y))
    assert NORM_OTHERS in past(found) and NORM_DC not in past(found)
    found = verdict(lambda e, c, y: cce.linear_cross_entropy(e, Scaled.apply(c), y))
    assert NORM_DC in past(found) and NORM_OTHERS not in past(found)


def test_shifted_targets_are_found(cce, verdict):
    found = verdict(lambda e, c, y: cce.linear_cross_entropy(e, c, y.roll(1)))
    assert {"loss, all steps", "loss, last quarter"} <= past(found)


def test_gradients_of_fewer_classes_are_found(cce, verdict):
    """A head of which every fourth row does not learn: the first step's loss is right, the curve is not."""

    def frozen(e, c, y):
        learns = (torch.arange(len(c)) % 4 > 0)[:, None]
        return cce.linear_cross_entropy(e, torch.where(learns, c, c.detach()), y)

    found = past(verdict(frozen))
    assert "loss, last quarter" in found and "loss, first step" not in found


def test_nan_is_not_within(materialized):
    broken = json.loads(json.dumps(materialized[MATERIALIZED]))
    broken["loss"][-1] = math.nan
    assert not convergence.judge(TINY, materialized | {"run": broken})["run"]["within"]
    records = materialized | {f"{MATERIALIZED}, broken": broken, "run": materialized[MATERIALIZED]}
    assert not convergence.judge(TINY, records)["run"]["within"]


def test_failure_of_a_schedule_is_a_result(materialized):
    def failing(e, c, y):
        raise ValueError("schedule: got 'x'")

    records = convergence.train_all(TINY, {"run": Run(failing)}, "cpu")
    found = convergence.judge(TINY, materialized | records)["run"]
    assert found == {"within": False, "failed": "ValueError: schedule: got 'x'"}
    with pytest.raises(ValueError, match="schedule"):
        convergence.train_all(TINY, {MATERIALIZED: Run(failing)}, "cpu")


def test_verdict_wants_the_control_found_out():
    assert convergence.holds({"control": {"within": False}, "recompute": {"within": True}})
    assert not convergence.holds({"control": {"within": True}, "recompute": {"within": True}})
    assert not convergence.holds({"control": {"within": False}, "recompute": {"within": False}})


def test_record_and_figure(cce, built, repo, tmp_path, monkeypatch, capsys):
    """The command from end to end: the record is complete, and the figure is drawn from it alone."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{repo}={built}")
    monkeypatch.setattr(convergence, "materialized_runs", partial(convergence.materialized_runs, orders=1, parts=()))
    record, figure = tmp_path / "record.json", tmp_path / "figure.png"
    command = ["convergence.py", "--tiny", "--device", "cpu", "--results", str(record)]
    monkeypatch.setattr("sys.argv", command)
    assert convergence.main() == 0, capsys.readouterr().out
    result = json.loads(record.read_text())
    schedules = set(cce.planner.SCHEDULES) - {"auto"}
    assert set(result["verdicts"]) == {"control"} | schedules
    assert {MATERIALIZED, f"{MATERIALIZED}, order 1"} | set(result["verdicts"]) == set(result["runs"])
    assert all(len(run["loss"]) == TINY.steps for run in result["runs"].values())
    assert result["environment"]["module"] == cce.__name__
    monkeypatch.setattr("sys.argv", [*command, "--figure", str(figure)])
    assert convergence.main() == 0
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_batches_are_windows_of_the_text():
    text = (byte_pairs.TEXTS / "alice.txt").read_bytes()
    settings = byte_pairs.Settings(steps=2, batch=3, length=5)
    ids = byte_pairs.batches(settings)
    assert ids.shape == (2, 3, 6) and torch.equal(ids, byte_pairs.batches(settings))
    for row in ids.flatten(0, 1).tolist():
        assert b"".join(token.to_bytes(2, "big") for token in row) in text


def test_model_is_causal():
    torch.manual_seed(0)
    model, ids = byte_pairs.Model(TINY), torch.randint(TINY.vocabulary, (2, TINY.length))
    changed = ids.clone()
    changed[:, 9:] = 0
    assert torch.equal(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.equal(model(ids)[:, 9:], model(changed)[:, 9:])
