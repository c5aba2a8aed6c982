"""What ranks do in tests of TRL."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch

import trainpipes as tp
from frameworks.example import example
from frameworks.runs import Start, rank
from frameworks.transformers_runs import Noting, saves

ROWS = 41
WORDS = "abcdefghij"
SHAPE = {"batch_size": 2, "num_shards": 4, "seed": 3}
CHAT = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def rows() -> tp.Pipeline:
    """Rows as TRL's trainers take them of a dataset."""
    return tp.from_dataset([{"text": f"{n} " + WORDS[: n % 7]} for n in range(ROWS)])


def batches(kind: str, **more: Any) -> tp.Pipeline:
    """Batches of the recipes."""
    shape = {**SHAPE, **more}
    if "sft" in kind:
        data = [{"prompt": f"{n} =", "response": WORDS[: n % 7 + 1]} for n in range(ROWS)]
        packed = {"packed": True, "max_length": 48} if "packed" in kind else {}
        return tp.recipe("sft", files=tp.from_dataset(data), tokenizer="bytes", **packed, **shape)
    if kind in ("preference", "reward"):
        data = [
            {"prompt": f"{n} =", "chosen": WORDS[: n % 7 + 1], "rejected": "n"} for n in range(ROWS)
        ]
        return tp.recipe("preference", files=tp.from_dataset(data), tokenizer="bytes", **shape)
    told = [
        [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": WORDS[: n % 7 + 1]}]
        for n in range(ROWS)
    ]
    return tp.recipe(
        "chat", files=tp.from_dataset([{"messages": one} for one in told]), tokenizer=tokenizer(),
        template=CHAT, max_length=48, packed=True, **shape,
    ).repeat()  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(n) for n in range(32, 127)]
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{c: n + 3 for n, c in enumerate(letters)}}
    made = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}",
    )


def model(scores: bool = False, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    return (LlamaForSequenceClassification if scores else LlamaForCausalLM)(
        LlamaConfig(
            vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_labels=1,
            num_attention_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def usual(folder: str, **more: Any) -> dict[str, Any]:
    """Options of any trainer."""
    return {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": False, "per_device_train_batch_size": 2, **more,
    }  # fmt: skip


#: The trainer and its arguments for each kind of batches.
TRAINERS = {"preference": ("DPOTrainer", "DPOConfig"), "reward": ("RewardTrainer", "RewardConfig"),
            "grpo": ("GRPOTrainer", "GRPOConfig"), "rloo": ("RLOOTrainer", "RLOOConfig")}  # fmt: skip
GENERATION: dict[str, Any] = {
    "num_generations": 2, "max_completion_length": 3, "steps_per_generation": 2, "beta": 0.0
}  # fmt: skip


def train(start: Start) -> dict[str, Any]:
    """The adapter, for batches of a recipe or for prompts; its options are those of the arguments."""
    warnings.simplefilter("ignore")
    import trl

    from trainpipes.integrations import trl as ours

    names = TRAINERS.get(start.kind, ("SFTTrainer", "SFTConfig"))
    base, config = getattr(ours, names[0]), getattr(trl, names[1])
    generates = start.kind in ("grpo", "rloo")

    class Told(Noting, base):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with (start.folder / f"generated-{rank()}").open("a") as file:
                line = self.state.global_step, [row["answer"] for row in inputs]
                file.write(json.dumps(line) + "\n")
            return super()._generate_and_score_completions(inputs)

    given = {"logging_steps": 1000, "save_strategy": "no", **saves(start), **start.options}
    given |= {**GENERATION, **given} if generates else {"max_length": 24}
    arguments = config(**usual(str(start.saved), **given))
    made: dict[str, Any] = {"reward_funcs": rewards} if generates else {}
    made |= {"ref_model": model()} if start.kind == "preference" else {}
    pipe = (
        prompts(batch_size=2 * arguments.steps_per_generation) if generates else batches(start.kind)
    )
    trainer = Told(
        model=model(start.kind == "reward"), args=arguments, processing_class=tokenizer(),
        train_dataset=pipe, **made,
    )  # fmt: skip
    outcome = trainer.go(start)
    return {"steps": outcome["steps"]} if generates else outcome  # it generates anew, otherwise


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def without_positions(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "position_ids"}


def evaluated(folder: str) -> dict[str, list[dict[str, float]]]:
    """What evaluations on batches of a pipeline say of them, on this many ranks."""
    import trl

    from trainpipes.integrations import trl as ours

    options = usual(folder, max_steps=2, eval_steps=1, save_strategy="no", learning_rate=0.0)
    found: dict[str, Any] = {}
    for name, made in ("sft", {}), ("preference", {"ref_model": model(seed=1)}), ("reward", {}):
        base, config = TRAINERS.get(name, ("SFTTrainer", "SFTConfig"))
        held_out = batches(name, train=False)  # 21, the last of a single row
        trainer = getattr(ours, base)(
            model=model(name == "reward"), args=getattr(trl, config)(eval_strategy="steps", **options),
            train_dataset=batches(name), eval_dataset=held_out, processing_class=tokenizer(), **made,
        )  # fmt: skip
        trainer.train()
        trainer.evaluate(held_out)
        found[name] = [
            {
                key: line[key]
                for key in line
                if not re.search("second|time|epoch|step|num_tokens", key)
            }
            for line in trainer.state.log_history
            if "eval_loss" in line
        ]
    return found


def trained_on_a_short_batch(folder: str) -> list[int]:
    """Steps of trainings on two ranks, the last of which has a row less on one."""
    warnings.simplefilter("ignore")
    import trl

    from trainpipes.integrations import trl as ours

    steps = []
    for name, made in ("preference", {"ref_model": model(seed=1)}), ("reward", {}):
        base, config = TRAINERS[name]
        trainer = getattr(ours, base)(
            model=model(name == "reward"), train_dataset=batches(name, batch_size=3, drop_last=False),
            args=getattr(trl, config)(**usual(folder, num_train_epochs=1, save_strategy="no")),
            processing_class=tokenizer(), **made,
        )  # fmt: skip
        trainer.train()
        steps.append(trainer.state.global_step)
    return steps


def write_samples(folder: str) -> None:
    """Pairs and a tokenizer for the docs' script."""
    tokenizer().save_pretrained(f"{folder}/tokenizer")
    pairs = [{"prompt": f"{n} =", "response": WORDS[: n % 7 + 1]} for n in range(112)]
    Path(folder, "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def script(arguments: list[str]) -> list[tuple[int, float]]:
    """The losses of the docs' script, by step."""
    warnings.simplefilter("ignore")
    history = example("trl_sft").main(arguments).state.log_history
    return [(line["step"], line["loss"]) for line in history if "loss" in line]


def prompt_rows(count: int = 24) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} = ", "answer": n} for n in range(count)]


def prompts(generations: int = 2, batch_size: int = 4) -> tp.Pipeline:
    from trainpipes_recipes.prompts import prompts as recipe

    return recipe(
        tp.from_dataset(prompt_rows()), batch_size=batch_size, num_generations=generations,
        num_shards=4, seed=3, buffer_size=5,
    )  # fmt: skip


def rewards(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [
        float(len(text) % 3 + number % 2) for text, number in zip(completions, answer, strict=True)
    ]
