"""What the integrations rely on that the frameworks do not document: it is there in the installed version.

A name that is gone fails here, by its own name, before a run resumes wrongly by it.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import pytest

#: Attributes of classes and modules, by where they are; and the integrations that need them.
NAMES = {
    "transformers:Trainer.set_initial_training_values": "transformers: where a run starts, and ends",
    "transformers:Trainer.get_total_train_batch_size": "transformers: what the log says",
    "transformers:Trainer.get_tp_size": "transformers: who reads the same batches",
    "transformers:Trainer.get_cp_size": "transformers: who reads the same batches",
    "transformers:Trainer.get_sp_size": "transformers: who reads the same batches",
    "transformers:Trainer._prepare_inputs": "trl: batches of preferences",
    "transformers.trainer_pt_utils:find_batch_size": "transformers: rows of an evaluation's batch",
    "accelerate.data_loader:DataLoaderStateMixin.begin": "accelerate, transformers: the loader at work",
    "accelerate.data_loader:DataLoaderStateMixin.end": "accelerate, transformers: the loader at work",
    "accelerate.state:GradientState._add_dataloader": "accelerate: the last batch steps",
    "trl:SFTTrainer._prepare_dataset": "trl: where the pipeline is given",
    "trl:DPOTrainer._prepare_dataset": "trl: where the pipeline is given",
    "datasets.iterable_dataset:_BaseExamplesIterable.load_state_dict": "datasets: its states",
    "datasets.iterable_dataset:_BaseExamplesIterable._init_state_dict": "datasets: its states",
    "datasets.iterable_dataset:_BaseExamplesIterable.shard_data_sources": "datasets: who reads what",
    "datasets.iterable_dataset:_BaseExamplesIterable.reshard_data_sources": "datasets: who reads what",
    "datasets.iterable_dataset:_BaseExamplesIterable.shuffle_data_sources": "datasets: the order is ours",
    "lightning.pytorch.utilities.combined_loader:CombinedLoader.flattened": "lightning: the loaders",
    "lightning.pytorch.loops.fit_loop:_FitLoop.restarting": "lightning: a resume within an epoch",
}
#: The same of what has no name in a class: what is written in the source of one.
WRITTEN = {
    "transformers:Trainer.save_model": "_internal_call",
    "transformers:Trainer._save_checkpoint": "self.save_model(output_dir, _internal_call=True)",
    "transformers:Trainer._run_epoch": "(step + 1) == steps_in_epoch",
    "transformers:Trainer.add_callback": "self.callback_handler",
    "transformers:Trainer": "int(self.state.global_step // num_update_steps_per_epoch)",
    "transformers:Trainer.evaluation_loop": "self.gather_function(",
    "transformers:Trainer.__init__": "self.label_names",
    "accelerate:Accelerator.gather_for_metrics": "self.gradient_state.remainder",
    "datasets.iterable_dataset:_BaseExamplesIterable.__init__": "self._state_dict",
    "datasets.iterable_dataset:IterableDataset.__init__": "self._ex_iterable",
    "datasets.iterable_dataset:shift_ex_examples_rngs": "ex_iterable.shift_rngs(value)",
    "datasets.iterable_dataset:MappedExamplesIterable.__init__": "self.ex_iterable",
    "datasets.iterable_dataset:_BaseExamplesIterable": "_sleep_on_threads_shutdown",
    "lightning.pytorch.utilities.combined_loader:CombinedLoader.__init__": "self._mode",
    "lightning.pytorch.loops.fit_loop:_FitLoop.__init__": "self.epoch_progress",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.__init__": "self.batch_progress",
}
#: Versions in which all of these are known to be there.
TRIED = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "trl": "1.16.0",
    "datasets": "5.2.0",
    "lightning": "2.6.6",
}


def found(place: str) -> Any:
    """What a place names, in a package that is installed."""
    pytest.importorskip(place.partition(":")[0].partition(".")[0])
    return resolve_name(place)


@pytest.mark.parametrize("place", NAMES)
def test_a_name_is_there(place: str) -> None:
    package = place.partition(":")[0].partition(".")[0]
    try:
        assert found(place) is not None
    except AttributeError as error:
        tried = f"{package} {TRIED[package]}, here {version(package)}"
        pytest.fail(f"{place} is gone ({error}), for {NAMES[place]}; it was there in {tried}")


@pytest.mark.parametrize("place", WRITTEN)
def test_what_is_relied_on_is_written_there(place: str) -> None:
    assert WRITTEN[place] in inspect.getsource(found(place)), place
