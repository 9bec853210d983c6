"""The pool's own promises: what is free is poison, what moves arrives whole, and bad tables are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
pytest.importorskip("torch")

import torch

from kvledger.kernels.device_pool import DevicePool, PageTable
from kvledger.kernels.model import MODELS, ModelSpec, embed, weights
from kvledger.kernels.tables import TableError
from kvledger.request import Prompt

pytestmark = pytest.mark.device

TINY = MODELS["tiny"]


def pool_of(pages: int = 6, slots: int = 4, host_pages: int = 4, spec: ModelSpec = TINY) -> DevicePool:
    return DevicePool(spec, pages=pages, slots=slots, page_size=4, host_pages=host_pages)


def fill(pool: DevicePool, pages: list[int]) -> None:
    for page in pages:
        pool.device.latents[page] = page + 1
        pool.device.rows[page] = pool.page_size


@pytest.mark.parametrize("name", MODELS)
def test_models_have_three_kda_layers_before_each_mla_layer(name: str) -> None:
    spec = MODELS[name]
    kinds = "".join(kind[0] for kind in spec.layers)
    assert (kinds.count("k"), kinds.count("m")) == (spec.kda_layers, spec.mla_layers)
    assert kinds.startswith("kkkm")
    assert kinds.endswith("m")


def test_small_models_tell_k_from_v() -> None:
    assert all(MODELS[name].k_size != MODELS[name].v_size for name in ("tiny", "small"))


def test_weights_and_inputs_are_the_same_every_time() -> None:
    again = weights.__wrapped__(TINY)
    assert all((one.inner == two.inner).all() for one, two in zip(weights(TINY), again, strict=True))
    whole = embed(Prompt([("a", 5), ("b", 7)]), 0, 12, 32)
    assert (embed(Prompt([("a", 5), ("b", 9)]), 3, 12, 32) == whole[3:]).all()
    assert (embed(Prompt([("b", 9)]), 0, 7, 32) == whole[5:]).all()
    assert len({row.tobytes() for row in whole}) == 12, "no token twice"


def test_a_new_pool_is_poison() -> None:
    pool = pool_of()
    assert not pool.faults(range(6), range(4))
    assert pool.device.latents.isnan().all()
    assert pool.host.states.isnan().all()


def test_poison_that_vanishes_is_found_and_nan_among_data_too() -> None:
    pool = pool_of()
    pool.device.latents[2, 0, 1, 3] = 0.5
    assert [fault.number for fault in pool.faults(range(6), range(4))] == [2]
    fill(pool, [2])
    pool.device.latents[2, 0, 3, 0] = float("nan")
    assert [fault.kind for fault in pool.faults([], [])] == ["nan"]
    fill(pool, [2])
    pool.device.rows[2] = 3
    assert [fault.where for fault in pool.faults([], [])] == ["row"], "the row past the last written one was written"


def test_pages_go_to_the_host_and_come_back() -> None:
    pool = pool_of(host_pages=0)
    fill(pool, [1, 2])
    pool.write_back(1, 3)
    pool.write_back(2, 0)
    pool.poison_pages([1, 2])
    assert not pool.faults(range(6), [])
    pool.load_back([3, 0], [5, 4])
    assert (pool.device.latents[5] == 2).all()
    assert (pool.device.latents[4] == 3).all()
    assert (pool.device.rows[5], pool.device.rows[1]) == (4, 0)


def test_the_host_grows_and_keeps_what_it_had() -> None:
    pool = pool_of(host_pages=2)
    fill(pool, [1])
    pool.write_back(1, 1)
    pool.grow_host(40)
    assert len(pool.host.rows) >= 40
    assert (pool.host.latents[1] == 2).all()
    assert pool.host.latents[39].isnan().all()


def test_a_state_moves_with_its_window() -> None:
    pool = pool_of()
    pool.device.states[1], pool.device.windows[1] = 7.0, 8.0
    pool.device.stated.add(1)
    pool.write_state_back(1, 2)
    pool.poison_slots([1])
    with pytest.raises(TableError, match="slot 1 is poison"):
        pool.check_state("r", 1)
    pool.load_state_back(2, 3)
    pool.restore(3, 0)
    for slot in (0, 3):
        pool.check_state("r", slot)
        assert (pool.device.states[slot] == 7).all()
        assert (pool.device.windows[slot] == 8).all()


@pytest.mark.parametrize(
    ("tables", "starts", "free", "message"),
    [
        ([PageTable("a", (1, 6), 0)], {"a": 0}, [], "page 6 of its table is outside"),
        ([PageTable("a", (1, -1), 0)], {"a": 0}, [], "page -1 of its table is outside"),
        ([PageTable("a", (1, 2), 0), PageTable("b", (2,), 0)], {"a": 0}, [], "b: page 2 of its table belongs to a"),
        ([PageTable("a", (1, 1), 0)], {"a": 0}, [], "a: page 1 of its table belongs to a"),
        ([PageTable("a", (1,), 1), PageTable("b", (1,), 0)], {}, [], "b: page 1 of its table belongs to the prefix"),
        ([PageTable("b", (1,), 0), PageTable("a", (1,), 1)], {}, [], "a: page 1 of its table belongs to b"),
        ([PageTable("a", (1, 2), 1)], {"a": 0}, [1], "page 1 of its table belongs to nobody: it is free"),
        ([PageTable("a", (1, 3), 0)], {"a": 5}, [], "page 3 of its table has 0 rows written, 1 needed"),
    ],
)
def test_tables_that_do_not_hold_are_refused(tables, starts, free, message) -> None:
    pool = pool_of()
    fill(pool, [1, 2])
    with pytest.raises(TableError, match=message):
        pool.check_tables(tables, starts, free)


def test_tables_that_hold_pass() -> None:
    pool = pool_of()
    fill(pool, [1, 2])
    pool.check_tables([PageTable("a", (1, 2, 3), 1), PageTable("b", (1, 4), 1)], {"a": 8, "b": 4}, [0, 5])


@pytest.mark.parametrize(
    ("owners", "free", "message"),
    [
        ([("a", [4])], [], "a: state slot 4 is outside"),
        ([("a", [-1])], [], "a: state slot -1 is outside"),
        ([("a", [1]), ("b", [2, 1])], [], "b: state slot 1 belongs to a"),
        ([("a", [1]), ("b", [2])], [0, 2], "b: state slot 2 belongs to nobody: it is free"),
    ],
)
def test_slots_that_do_not_hold_are_refused(owners: list[tuple[str, list[int]]], free: list[int], message: str) -> None:
    with pytest.raises(TableError, match=message):
        pool_of().check_slots(owners, free)
    pool_of().check_slots([("a", [1]), ("b", [2, 3])], [0])


def test_a_copy_of_poison_starts_no_launch() -> None:
    pool = pool_of()
    pool.device.stated.add(3)
    pool.write_state_back(0, 2)
    for move in (pool.restore, pool.load_state_back):
        move(2, 3)
        with pytest.raises(TableError, match="state slot 3 is poison"):
            pool.check_state("r", 3)
        pool.device.stated.add(3)


def test_every_layer_of_a_deeper_model_moves() -> None:
    pool = pool_of(spec=MODELS["small"])
    pool.device.latents[0] = torch.arange(2.0).view(2, 1, 1)
    pool.device.states[0] = torch.arange(6.0).view(6, 1, 1, 1)
    pool.write_back(0, 1)
    pool.load_back([1], [3])
    pool.restore(0, 2)
    assert pool.device.latents[3, :, 0, 0].tolist() == [0, 1]
    assert pool.device.states[2, :, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


FREE: dict[str, tuple[str, str]] = {
    "a free slot's state": ("device", "states"),
    "a free slot's window": ("device", "windows"),
    "a free page": ("device", "latents"),
    "a free host place's latents": ("host", "latents"),
    "a free host place's state": ("host", "states"),
    "a free host place's window": ("host", "windows"),
}


@pytest.mark.parametrize("name", FREE)
def test_one_word_of_poison_that_vanishes_anywhere(name: str) -> None:
    tier, tensor = FREE[name]
    pool = pool_of(spec=MODELS["small"])
    everything = (range(6), range(4), range(4))
    assert not pool.faults(*everything)
    values = getattr(getattr(pool, tier), tensor)
    values[2].flatten()[-1] = 0.5
    (fault,) = pool.faults(*everything)
    assert (fault.kind, fault.number, fault.element) == ("overwritten", 2, values[2].numel() - 1)


@pytest.mark.parametrize("tensor", ["states", "windows"])
def test_a_nan_in_a_slot_that_holds_a_state(tensor: str) -> None:
    pool = pool_of()
    pool.device.states[1] = pool.device.windows[1] = 0.0
    pool.device.stated.add(1)
    assert not pool.faults(range(6), [0, 2, 3])
    getattr(pool.device, tensor)[1].flatten()[3] = float("nan")
    (fault,) = pool.faults(range(6), [0, 2, 3])
    assert (fault.kind, fault.number, fault.element) == ("nan", 1, 3)


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_of_a_partly_filled_page_in_every_layer(layer: int) -> None:
    """Written rows are data, those past them poison."""
    for row, kind in ((1, "nan"), (2, "overwritten")):
        pool = pool_of(spec=MODELS["small"])
        pool.device.latents[3, :, :2] = 1.0
        pool.device.rows[3] = 2
        assert not pool.faults([0, 1, 2, 4, 5], range(4))
        pool.device.latents[3, layer, row, 5] = float("nan") if kind == "nan" else 1.0
        (fault,) = pool.faults([0, 1, 2, 4, 5], range(4))
        assert (fault.kind, fault.where, fault.number) == (kind, "row", (3 * 2 + layer) * 4 + row)


def test_what_leaves_the_host_is_poison_in_all_three() -> None:
    pool = pool_of()
    for tensor in (pool.host.latents, pool.host.states, pool.host.windows):
        tensor[2] = 1.0
    pool.poison_host([2])
    assert not pool.faults([], [], range(4))


def test_the_slots_grow_and_keep_what_they_had() -> None:
    pool = pool_of(slots=2)
    pool.device.states[1], pool.device.windows[1] = 7.0, 8.0
    pool.device.stated.add(1)
    pool.grow_slots(5)
    assert pool.slots >= 5
    assert (pool.device.states[1] == 7).all()
    assert (pool.device.windows[1] == 8).all()
    assert not pool.faults(range(6), [0, *range(2, pool.slots)])


def test_bytes_are_those_of_the_tensors() -> None:
    for spec in (TINY, MODELS["small"]):
        pool = pool_of(spec=spec)
        latents, states = DevicePool.bytes_of(spec, pages=6, slots=4, page_size=4, dtype=torch.float32)
        assert latents == pool.device.latents.nbytes
        assert states == pool.device.states.nbytes + pool.device.windows.nbytes
