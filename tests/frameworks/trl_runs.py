"""What ranks do in tests of TRL."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import trainpipes as tp
from frameworks.example import example
from frameworks.steps import Steps

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


def batches(kind: str) -> tp.Pipeline:
    """Batches of the recipes."""
    if "sft" in kind:
        data = [{"prompt": f"{n} =", "response": WORDS[: n % 7 + 1]} for n in range(ROWS)]
        packed = {"packed": True, "max_length": 48} if "packed" in kind else {}
        return tp.recipe("sft", files=tp.from_dataset(data), tokenizer="bytes", **packed, **SHAPE)
    if kind == "preference":
        data = [
            {"prompt": f"{n} =", "chosen": WORDS[: n % 7 + 1], "rejected": "n"} for n in range(ROWS)
        ]
        return tp.recipe("preference", files=tp.from_dataset(data), tokenizer="bytes", **SHAPE)
    told = [
        [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": WORDS[: n % 7 + 1]}]
        for n in range(ROWS)
    ]
    return tp.recipe(
        "chat", files=tp.from_dataset([{"messages": one} for one in told]), tokenizer=tokenizer(),
        template=CHAT, max_length=48, packed=True, **SHAPE,
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


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def usual(folder: str, **more: Any) -> dict[str, Any]:
    """Options of any trainer."""
    return {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": False, "per_device_train_batch_size": 2, **more,
    }  # fmt: skip


def train(
    folder: str,
    log: str,
    kind: str,
    steps: int,
    resume: bool | str = False,
    stand_at: int | None = None,
    **options: Any,
) -> int:
    """Train on batches of a recipe, a checkpoint every few steps, and note each batch; returns the steps."""
    if kind in ("grpo", "rloo"):
        return generate(folder, log, kind, steps, resume, stand_at, **options)
    warnings.simplefilter("ignore")
    import trl

    from trainpipes.integrations.trl import DPOTrainer, SFTTrainer

    preference = "preference" in kind
    base = DPOTrainer if preference else SFTTrainer

    class Noting(base):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == stand_at:
                time.sleep(1000)
            name = "input_ids" if "input_ids" in inputs else "chosen_input_ids"
            noted.trained_on(0, self.state.global_step, {"input_ids": inputs[name]})
            return super().training_step(model, inputs, *args, **kwargs)

    config = trl.DPOConfig if preference else trl.SFTConfig
    given = {
        "max_steps": steps,
        "save_steps": 3,
        "logging_steps": 1000,
        "max_length": 24,
        **options,
    }
    arguments = config(**usual(folder, **given))
    noted = Steps(Path(log), arguments.process_index)
    made: dict[str, Any] = {"ref_model": model()} if preference else {}
    made["train_dataset"] = batches(kind)
    trainer = Noting(model=model(), args=arguments, processing_class=tokenizer(), **made)
    trainer.train(resume_from_checkpoint=resume or None)
    return int(trainer.state.global_step)


def other_batches(folder: str) -> list[str]:
    """What is said to batches of another kind, and to a loader."""
    import trl

    from trainpipes.integrations.trl import DPOTrainer, SFTTrainer

    said = []

    def told(base: Any, config: Any, data: Any, **more: Any) -> None:
        try:
            trainer = base(
                model=model(), args=config(**usual(folder, max_steps=2)), train_dataset=data,
                processing_class=tokenizer(), **more,
            )  # fmt: skip
            trainer.train()
            said.append("trained")
        except tp.TrainpipesError as error:
            said.append(str(error))

    told(SFTTrainer, trl.SFTConfig, batches("preference"))
    told(DPOTrainer, trl.DPOConfig, batches("sft"), ref_model=model())
    told(SFTTrainer, trl.SFTConfig, tp.Loader(batches("sft")))
    bare = batches("sft").map(without_labels)
    told(SFTTrainer, trl.SFTConfig, bare)
    told(SFTTrainer, trl.SFTConfig, rows())
    told(SFTTrainer, trl.SFTConfig, rows().to_hf())
    told(SFTTrainer, trl.SFTConfig, batches("sft"), eval_dataset={"held out": rows()})
    return said


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def evaluated(folder: str) -> dict[str, Any]:
    """What an evaluation on batches of a pipeline says, on this many ranks, and what is refused."""
    import trl

    from trainpipes.integrations.trl import DPOTrainer, SFTTrainer

    options = usual(folder, max_steps=2, eval_steps=1, save_strategy="no", learning_rate=0.0)
    found: dict[str, Any] = {}
    for name, base, config in (
        ("sft", SFTTrainer, trl.SFTConfig),
        ("preference", DPOTrainer, trl.DPOConfig),
    ):
        torch.manual_seed(0)
        given = {"ref_model": model()} if name == "preference" else {}
        trainer = base(
            model=model(), args=config(eval_strategy="steps", **options), train_dataset=batches(name),
            eval_dataset=batches(name), processing_class=tokenizer(), **given,
        )  # fmt: skip
        trainer.train()
        logged = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        found[name] = [*logged, trainer.evaluate(batches(name))["eval_loss"]]
    said = []
    given = {"model": model(), "train_dataset": batches("sft"), "processing_class": tokenizer()}
    for more in ({"packing": True}, {"dataset_kwargs": {"skip_prepare_dataset": True}}):
        try:
            SFTTrainer(args=trl.SFTConfig(**options, **more), **given)
        except tp.ConfigError as error:
            said.append(str(error))
    return {**found, "said": said}


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


GENERATION: dict[str, Any] = {
    "num_generations": 2, "max_completion_length": 3, "steps_per_generation": 2, "beta": 0.0
}  # fmt: skip


def rewards(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    return [
        float(len(text) % 3 + number % 2) for text, number in zip(completions, answer, strict=True)
    ]


def generate(
    folder: str,
    log: str,
    kind: str,
    steps: int,
    resume: bool | str = False,
    stand_at: int | None = None,
    **options: Any,
) -> int:
    """Train on prompts, and note those of each optimizer step, in their order; returns the steps."""
    warnings.simplefilter("ignore")
    import trl

    from trainpipes.integrations.trl import GRPOTrainer, RLOOTrainer

    base, config = (
        (GRPOTrainer, trl.GRPOConfig) if kind == "grpo" else (RLOOTrainer, trl.RLOOConfig)
    )

    class Noting(base):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == stand_at:
                time.sleep(1000)
            ids = torch.tensor([row["answer"] for row in inputs])
            noted.trained_on(0, self.state.global_step, {"input_ids": ids})
            return super().training_step(model, inputs, *args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made.append((self.state.global_step, [row["answer"] for row in inputs]))
            with open(f"{log}-generated-{arguments.process_index}", "a") as file:
                file.write(json.dumps(made[-1]) + "\n")
            return super()._generate_and_score_completions(inputs)

    given = {"max_steps": steps, "save_steps": 3, "logging_steps": 1000, **GENERATION, **options}
    arguments = config(**usual(folder, **given))
    noted, made = Steps(Path(log), arguments.process_index), []
    trainer = Noting(
        model=model(), reward_funcs=rewards, args=arguments, processing_class=tokenizer(),
        train_dataset=prompts(batch_size=2 * arguments.steps_per_generation),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    return int(trainer.state.global_step)


def other_prompts(folder: str) -> list[str]:
    """What is said to pipelines that do not fit."""
    import trl
    from datasets import Dataset

    from trainpipes.integrations.trl import GRPOTrainer

    arguments = usual(folder, max_steps=1, **GENERATION)
    said = []
    rows = tp.from_dataset(prompt_rows())
    held_out = {"eval_dataset": prompts()}
    for data, more in [
        (rows, {}), (prompts(1), {}), (prompts(2, 8), {}), (batches("sft"), {}), (prompts(), held_out),
        (prompts(), {"global_batches": 4}),
        (Dataset.from_list(prompt_rows()), {}),
    ]:  # fmt: skip
        try:
            GRPOTrainer(
                model=model(), reward_funcs=rewards, args=trl.GRPOConfig(**arguments),
                processing_class=tokenizer(), train_dataset=data, **more,
            ).train()  # fmt: skip
            said.append("trained")
        except tp.TrainpipesError as error:
            said.append(str(error))
    return said
