"""``summarize`` says where a state stands, and ``fits`` whether a pipeline takes it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

import trainpipes as tp
from checkpoint.layouts import counted, of_ranks, state, uncounted
from trainpipes.look import FoundState, StateSummary, fits, summarize


def summary_of(pipe: tp.Pipeline, steps: int = 2) -> StateSummary:
    return summarize(FoundState("x", "", state(pipe, steps)))


def found(*states: dict[str, object]) -> list[FoundState]:
    return [FoundState(f"rank-{number}.pt", "", one) for number, one in enumerate(states)]


def test_a_summary_says_where_the_run_stands() -> None:
    one = summary_of(counted(), 7)
    assert asdict(one) == {
        "format": 2,
        "epoch": 0,
        "batches": 7,
        "rank": None,
        "num_shards": 12,
        "world_sizes": [1, 2, 3, 4, 6, 12],
        "stages": ["from_tensors", "sharding_filter", "shuffle", "batch", "collate"],
    }


@pytest.mark.parametrize("world", [2, 3, 4, 6, 12])
def test_whose_rank_a_state_is(world: int) -> None:
    for rank, one in enumerate(of_ranks(world)):
        assert summarize(FoundState("x", "", one)).rank == (rank, world)


def test_a_damaged_state_is_refused() -> None:
    for damaged in (
        {**state(), "batches": 9},
        {**state(), "pipeline": "{}"},
        {**state(), "trainpipes": 99},
        {"trainpipes": 3, "batches": 1},
    ):
        with pytest.raises(tp.StateError):
            summarize(found(damaged)[0])


# Whether a pipeline takes it


@pytest.mark.filterwarnings("ignore:5 ranks do not divide num_shards=12")
def test_a_state_fits_its_pipeline_on_any_ranks() -> None:
    pipe = counted()
    for world in (1, 2, 3, 5, 12):
        (fit,) = fits(found(state()), pipe, world_size=world)
        assert (fit.problem, fit.share) == ("", 7 / 60)
    assert pipe.state_dict() == counted().state_dict()  # it has not moved


def test_what_differs_is_said_in_the_words_of_the_error() -> None:
    other = tp.Loader(counted().map(str))
    with pytest.raises(tp.StateError) as error:
        other.load_state_dict(state())
    (fit,) = fits(found(state()), counted().map(str))
    assert fit.problem == str(error.value)


def test_changes_may_be_allowed() -> None:
    larger = tp.Pipeline([*counted().stages[:3]]).batch(10).collate()
    (fit,) = fits(found(state()), larger)
    assert "batch_size: saved 5, now 10" in fit.problem
    (fit,) = fits(found(state(steps=10)), larger, allow_changes=["batch_size"])
    assert (fit.problem, fit.share) == ("", pytest.approx(10 / 35, abs=0.02))


def test_states_of_all_ranks_are_one_for_another_number_of_ranks() -> None:
    saved = of_ranks(3)
    for world in (1, 2, 3, 4):
        (fit,) = fits(found(*saved), uncounted(), world_size=world)
        assert fit.problem == ""
        assert fit.where == ("rank-0.pt", "rank-1.pt", "rank-2.pt")
    (fit,) = fits(found(*saved[:2]), uncounted(), world_size=2)
    assert "those of rank [2] of 3" in fit.problem


def test_a_state_of_one_rank_fits_where_that_is_all_it_takes() -> None:
    (fit,) = fits(found(of_ranks(1)[0]), uncounted(), world_size=2)
    assert fit.problem == ""
    (fit,) = fits(found(of_ranks(2)[1]), uncounted(), world_size=2)
    assert fit.problem


def test_states_of_several_pipelines_are_tried_one_by_one() -> None:
    first, second = fits(found(state(), state(uncounted())), counted())
    assert first.problem == ""
    assert "stages: saved" in second.problem


def test_what_is_damaged_does_not_fit() -> None:
    bad = FoundState("x.pt", problem="x.pt is damaged")
    fit, good = fits([bad, *found(state())], counted())
    assert (fit.problem, good.problem) == ("x.pt is damaged", "")
    (fit,) = fits(found({**state(), "batches": 9}), counted())
    assert "was edited or is damaged" in fit.problem
