"""Every stage resumes exactly; from before every item, where slow tests are asked for."""

import warnings

import pytest

import trainpipes as tp
from every_stage import ENDLESS, FINITE, public_stages
from trainpipes.testing import check_resume

pytestmark = pytest.mark.filterwarnings("ignore:pin.. does nothing here:UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def test_no_stage_is_missing_here():
    tried = {name.split(" / ")[0] for name in [*FINITE, *ENDLESS]}
    assert public_stages() == tried


@pytest.mark.parametrize("name", FINITE)
def test_a_stage_resumes_exactly(name, folder):
    pipe = FINITE[name](folder)
    if " / " in name:  # a variant before some items
        report = check_resume(pipe, processes=0, every=10, epochs=2)
    else:  # a stage before some of a later epoch, too, and in another process
        report = check_resume(pipe, processes=1, every=10, epochs=3)
    assert report.items[0] >= 3
    print(f"{name}: {report}")  # noqa: T201


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_stage_resumes_exactly(name, folder):
    pipe = ENDLESS[name](folder)
    report = check_resume(pipe, limit=36, epochs=2, every=16, processes=1)
    assert report.items == (36, 36)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_a_stage_resumes_exactly_from_before_every_item(name, folder):
    if name in FINITE:
        check_resume(FINITE[name](folder), epochs=3)
    else:
        check_resume(ENDLESS[name](folder), limit=40, epochs=2)


def test_a_process_that_is_not_forked_from_here_resumes_the_whole_chain(folder):
    for name in ("tokenize", "filter / before"):
        check_resume(
            FINITE[name](folder), processes=1, every=9, epochs=2, start_method="forkserver"
        )


@pytest.mark.parametrize("name", FINITE)
def test_a_pipeline_prints_compares_and_pickles_as_its_record(name, folder):
    import pickle

    pipe = FINITE[name](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = repr(pipe)
    assert text.splitlines()[1].startswith("  .")
    assert pipe == FINITE[name](folder)
    assert hash(pipe) == hash(FINITE[name](folder))
    batched = "batch" in text or "bucket" in text
    assert pipe != (tp.from_iterable(list) if batched else pipe.batch(3))
    # Those hold an object that is like none but itself.
    if not any(held in repr(pipe) for held in ("from_dataset", "chat_template", "from_torchdata")):
        again = pickle.loads(pickle.dumps(pipe))
        assert again == pipe
        assert repr(again) == text
