"""Batches of recipes, and prompts, in TRL's trainers: killed, they go on with what would have come."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

import trainpipes as tp
from frameworks import trl_runs as runs
from frameworks.ranks import Ranks, run
from frameworks.runs import Start, check_resumes, plain
from trainpipes._internal import messages
from trainpipes_recipes.prompts import prompts


@pytest.mark.parametrize("recipe", ["chat", "packed sft", "preference", "reward"])
def test_batches_of_recipes_go_on(tmp_path: Path, recipe: str) -> None:
    # Of 20 batches in an epoch.
    check_resumes(runs.train, tmp_path, recipe, ranks=1, every=3, holds=(4, 22), max_steps=24)


def test_batches_of_the_sft_recipe_go_on_on_any_number_of_ranks(tmp_path: Path) -> None:
    # 20 batches an epoch: 10 steps of two ranks
    expected = [list(chain.from_iterable(plain(runs.batches("sft"))))]
    check_resumes(
        runs.train, tmp_path, "sft", every=3, holds=(14,), moved=(12,), back=(12,), expected=expected,
        max_steps=17,
    )  # fmt: skip


def test_the_docs_script_goes_on_after_a_kill(tmp_path: Path) -> None:
    run(runs.write_samples, 1, tmp_path / "writing", str(tmp_path))
    arguments = ["--files", f"{tmp_path}/pairs.jsonl", "--tokenizer", f"{tmp_path}/tokenizer"]
    arguments += ["--save-steps", "3", "--batch-size", "4", "--epochs"]
    options = [*arguments, "2", "--output"]
    whole = run(runs.script, 2, tmp_path / "a", [*options, f"{tmp_path}/whole"])[0]
    assert [step for step, _ in whole] == list(range(1, 15))
    out = tmp_path / "out"
    running = Ranks(runs.script, 2, tmp_path / "b", [*options, str(out)])
    running.kill_when(lambda: is_whole(out / "checkpoint-6"))
    for checkpoint in out.glob("checkpoint-*"):  # that it was killed in
        if not is_whole(checkpoint):
            shutil.rmtree(checkpoint)
    assert run(runs.script, 2, tmp_path / "c", [*options, str(out)])[0] == whole


def is_whole(checkpoint: Path) -> bool:
    """Whether the trainer has come to the end of the file that it writes last, and not in one go."""
    path = checkpoint / "trainer_state.json"
    return path.exists() and path.read_text().endswith("}\n")


def test_an_evaluation_on_batches_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    (alone,) = run(runs.evaluated, 1, tmp_path / "one", str(tmp_path / "out-1"))
    ranks = run(runs.evaluated, 2, tmp_path / "two", str(tmp_path / "out-2"))
    for rank in ranks:
        for name, metrics in (
            ("sft", {"eval_mean_token_accuracy", "eval_entropy"}),
            ("preference", {"eval_rewards/margins", "eval_logps/chosen", "eval_logits/rejected"}),
            ("reward", {"eval_min_reward", "eval_margin", "eval_accuracy"}),
        ):
            assert len(rank[name]) == 3
            for said, expected in zip(rank[name], alone[name], strict=True):
                assert said.keys() >= metrics
                assert said == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_pairs_train_where_the_last_batch_of_a_rank_is_short(tmp_path: Path) -> None:
    assert run(runs.trained_on_a_short_batch, 2, tmp_path / "two", str(tmp_path)) == [[7, 7]] * 2


@pytest.mark.filterwarnings("ignore")
def test_tokens_of_packed_rows_are_counted_without_padding(tmp_path: Path) -> None:
    import trl

    from trainpipes.integrations.trl import SFTTrainer

    options = runs.usual(str(tmp_path), max_steps=3, logging_steps=1, save_strategy="no")
    trainer = SFTTrainer(
        model=runs.model(), args=trl.SFTConfig(**options), train_dataset=runs.batches("packed sft").repeat(),
        processing_class=runs.tokenizer(),
    )  # fmt: skip
    trainer.train()
    batches = islice(runs.batches("packed sft").repeat(), 3)
    wanted = list(accumulate(int((batch["segment_ids"] > 0).sum()) for batch in batches))
    logged = trainer.state.log_history
    assert [line["num_tokens"] for line in logged if "num_tokens" in line] == wanted


def test_batches_of_preferences_are_as_trl_makes_them_of_their_ids() -> None:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    from trainpipes.integrations.trl import preference_batch

    batch = next(iter(runs.batches("preference")))
    answers = []
    for number in range(2):
        row = {}
        for side in ("chosen", "rejected"):
            length = int(batch[f"{side}_attention_mask"][number].sum())
            ids = batch[f"{side}_input_ids"][number, :length]
            answer = batch[f"{side}_labels"][number, :length] != -100
            row |= {"prompt_ids": ids[~answer].tolist(), f"{side}_ids": ids[answer].tolist()}
        answers.append(row)
    wanted, found = DataCollatorForPreference(pad_token_id=0)(answers), preference_batch(batch)
    found["input_ids"] *= found["attention_mask"]
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore")
def test_rewards_of_pairs_are_those_that_trl_gives_rows_of_text(tmp_path: Path) -> None:
    import trl

    from trainpipes.integrations.trl import RewardTrainer

    pairs = [
        {"prompt": f"{n} =", "chosen": "c" * (n % 5 + 1), "rejected": "r" * (n % 3 + 1)}
        for n in range(11)
    ]
    options = runs.usual(str(tmp_path), per_device_eval_batch_size=4, max_steps=1)
    tokenizer = runs.tokenizer()
    tokenizer.pad_token = "<unk>"  # of an id that is not 0
    pipe = tp.recipe(
        "preference", tp.from_dataset(pairs), tokenizer, batch_size=4, train=False, num_shards=1
    )
    found = []
    for trainer, data in (RewardTrainer, pipe), (trl.RewardTrainer, Dataset.from_list(pairs)):
        made = trainer(
            model=runs.model(scores=True), args=trl.RewardConfig(**options), processing_class=tokenizer,
            train_dataset=data, eval_dataset=data,
        )  # fmt: skip
        scores = made.evaluate()
        found.append([scores[f"eval_{name}"] for name in ("loss", "min_reward", "max_reward")])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


#: The trainer, what it trains on, its arguments, others of its options, and what is said.
REFUSED: list[tuple[str, Callable[[], Any], dict[str, Any], dict[str, Callable[[], Any]], str]] = [
    ("SFT", lambda: runs.batches("preference"), {}, {},
     "a batch of SFTTrainer must be one with input_ids, labels, as the recipe sft makes it"),
    ("DPO", lambda: runs.batches("sft"), {}, {"ref_model": runs.model},
     "a batch of DPOTrainer must be one with chosen_input_ids, rejected_input_ids, chosen_labels"),
    ("Reward", lambda: runs.batches("sft"), {}, {},
     "a batch of RewardTrainer must be one with chosen_input_ids, rejected_input_ids, chosen_labels"),
    ("SFT", lambda: tp.Loader(runs.batches("sft")), {}, {}, "write train_dataset=pipe"),
    ("SFT", lambda: runs.batches("sft").map(runs.without_labels), {}, {},
     "a batch of SFTTrainer must be one with labels, as the recipe sft makes it"),
    ("SFT", lambda: runs.batches("packed sft").map(runs.without_positions), {}, {},
     "a batch of SFTTrainer must be one with position_ids, as the recipe sft makes it"),
    ("SFT", runs.rows, {}, {},
     "train_dataset must make batches, got single rows; write train_dataset=tp.recipe('sft',"),
    ("SFT", lambda: runs.rows().to_hf(), {}, {}, "train_dataset must be the pipeline itself"),
    ("SFT", lambda: runs.batches("sft"), {}, {"eval_dataset": lambda: {"held out": runs.rows()}},
     "eval_dataset must make batches, got single rows; write eval_dataset=tp.recipe('sft',"),
    ("SFT", lambda: runs.batches("sft"), {"packing": True}, {},
     "packing must be off for a pipeline that makes batches, got True; let the pipeline pack: packed=True "
     "of the recipes sft and chat"),
    ("SFT", lambda: runs.batches("sft"), {"padding_free": True, "max_length": None}, {},
     "padding_free must be off for a pipeline that makes batches, got True; let the pipeline pack"),
    ("SFT", lambda: runs.batches("sft"), {"pad_to_multiple_of": 8}, {},
     "pad_to_multiple_of must be off for a pipeline that makes batches, got 8; give None, and let"),
    ("DPO", lambda: runs.batches("preference"), {"pad_to_multiple_of": 8}, {"ref_model": runs.model},
     "pad_to_multiple_of must be off for a pipeline that makes batches, got 8"),
    ("SFT", lambda: runs.batches("sft"), {}, {"formatting_func": lambda: runs.without_labels},
     "formatting_func must be off for a pipeline that makes batches, got "),
    ("SFT", lambda: runs.batches("sft"), {"assistant_only_loss": True}, {},
     "assistant_only_loss must be off for a pipeline that makes batches, got True; the recipe chat"),
    ("SFT", lambda: runs.batches("sft"), {"dataset_kwargs": {"skip_prepare_dataset": True}}, {},
     "skip_prepare_dataset"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "data", "given", "more", "said"), REFUSED)
def test_what_does_not_fit_is_refused(
    kind: str, data: Any, given: Any, more: Any, said: str, tmp_path: Path
) -> None:
    import trl

    from trainpipes.integrations import trl as ours

    arguments = getattr(trl, f"{kind}Config")(**runs.usual(str(tmp_path), max_steps=2, **given))
    with pytest.raises(tp.TrainpipesError, match=re.escape(said)):
        getattr(ours, f"{kind}Trainer")(
            model=runs.model(scores=kind == "Reward"), args=arguments, train_dataset=data(),
            processing_class=runs.tokenizer(), **{name: made() for name, made in more.items()},
        ).train()  # fmt: skip


# Prompts


@pytest.mark.parametrize(
    ("count", "generations", "per_batch", "times"), [(24, 2, 2, 4), (23, 8, 3, 1), (7, 3, 1, 6)]
)
@pytest.mark.parametrize("world", [1, 2])
def test_the_order_is_that_of_trls_sampler(
    count: int, generations: int, per_batch: int, times: int, world: int
) -> None:
    from trl.trainer.utils import RepeatSampler

    from trainpipes.integrations.transformers.loaders import TrainingLoader

    rows = tp.from_dataset(runs.prompt_rows(count)).sharding_filter(12, split="stride").shuffle(1)
    pipe = prompts(rows, batch_size=per_batch * generations, num_generations=generations)
    loaders = [
        TrainingLoader(tp.Loader(pipe.distributed(rank=rank, world_size=world)), list, times)
        for rank in range(world)
    ]
    found = [
        row["answer"] for step in zip(*loaders, strict=True) for batch in step for row in batch
    ]
    order = [row["answer"] for row in tp.from_dataset(runs.prompt_rows(count))]
    wanted = RepeatSampler(order, generations, per_batch * world, times, shuffle=False)
    assert found == [order[n] for n in wanted]
    assert sum(map(len, loaders)) * per_batch * generations == len(wanted)


def generated(start: Start, rank: int = 0) -> list[Any]:
    """For each generation: the step that it was for, and its rows."""
    return list(map(json.loads, (start.folder / f"generated-{rank}").read_text().splitlines()))


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_prompts_go_on_after_a_kill(tmp_path: Path, kind: str) -> None:
    # Of 24 steps in an epoch.
    found = check_resumes(runs.train, tmp_path, kind, ranks=1, every=3, holds=(4, 26), max_steps=28)
    whole, rest = generated(found["whole"]), generated(found["part-1"])
    # Between two steps of the same generations, it generates at once, and then when it would have.
    assert rest[0] == [3, whole[1][1]]
    assert rest[1:] == whole[2 : 1 + len(rest)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}])
def test_two_ranks_have_whole_groups_and_go_on(tmp_path: Path, options: dict[str, Any]) -> None:
    found = check_resumes(
        runs.train, tmp_path, "grpo", every=3, holds=(4, 11), max_steps=14, **options
    )
    seen = []
    for one, other in zip(*(generated(found["whole"], rank) for rank in (0, 1)), strict=True):
        assert one[0] == other[0]
        for _, answers in (one, other):
            assert answers[::2] == answers[1::2]
            seen += answers[::2]
    assert len(set(seen[:24])) == min(24, len(seen))


def test_the_batch_size_of_the_arguments_is_that_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl

    from trainpipes.integrations.trl import GRPOTrainer

    given = {**runs.GENERATION, "num_generations": 4, "gradient_accumulation_steps": 3}
    given = runs.usual(str(tmp_path), max_steps=2, **given | {"per_device_train_batch_size": 4})
    monkeypatch.setattr(messages, "_warned", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = GRPOTrainer(
            model=runs.model(), reward_funcs=runs.rewards, processing_class=runs.tokenizer(),
            args=trl.GRPOConfig(**given), train_dataset=runs.prompts(4, 8),
        )  # fmt: skip
    assert not [one for one in said if "has no effect" in str(one.message)]
    assert trainer.get_total_train_batch_size(trainer.args) == 4 * 3


#: What it trains on, other options, and what is said; nothing of a dataset, which TRL takes itself.
FITTING: list[tuple[Callable[[], Any], dict[str, Any], str | None]] = [
    (lambda: tp.from_dataset(runs.prompt_rows()), {},
     "train_dataset must make batches, got single rows; write train_dataset=tp.recipe("),
    (lambda: runs.prompts(1), {}, "= 4 rows, each prompt 2 times side by side, got 4; write tp.recipe("),
    (lambda: runs.prompts(2, 8), {}, "got 8; write"),
    (lambda: runs.batches("sft"), {},
     "a list of rows with a \"prompt\", got ['input_ids', 'attention_mask', 'labels']"),
    (runs.prompts, {"eval_dataset": runs.prompts()}, "eval_dataset must be a datasets.Dataset"),
    (runs.prompts, {"global_batches": 4},
     "global_batches must be left out where generations are used for several steps"),
    (lambda: Dataset.from_list(runs.prompt_rows()), {}, None),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("data", "more", "said"), FITTING)
def test_pipelines_that_do_not_fit_are_refused(
    data: Any, more: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    import trl

    from trainpipes.integrations.trl import GRPOTrainer

    arguments = trl.GRPOConfig(**runs.usual(str(tmp_path), max_steps=1, **runs.GENERATION))
    refused = pytest.raises(tp.TrainpipesError, match=re.escape(said or ""))
    with nullcontext() if said is None else refused:
        GRPOTrainer(
            model=runs.model(), reward_funcs=runs.rewards, args=arguments, processing_class=runs.tokenizer(),
            train_dataset=data(), **more,
        ).train()  # fmt: skip
