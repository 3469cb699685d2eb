"""An interpreter for Gluon kernels: it runs the source of the Hopper kernels on CPU tensors.

Triton's interpreter does not support Gluon. This one implements the operations that the kernels use, for one
program after another. Register layouts do not change values and are ignored. Products happen when the kernel
waits for them. Partitions of a warp-specialized kernel are threads of which one runs at a time.

A missing wait, arrival or fence fails, in whatever order partitions run: ``races`` follows copies and
products until the kernel has waited for them. Shared memory starts as NaN. Not seen are barriers between the
warps of a partition (``group_barrier``), which is one thread here, and the order of accesses to global
memory.
"""

from __future__ import annotations

import ast
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gluon
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper as instructions

from mindspeed_dsa.ops.sparse_flash_attention import hopper_common
from tests.ops.races import COPIES, ITSELF, PRODUCTS, Knowledge, Partition, Record

# Threads of a copying warp group: each arrives at the barrier of its copies.
_COPYING = 128
_own = threading.local()


class Value(torch.Tensor):
    """Numbers in registers."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def _value(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(Value)


def _plain(value: Any) -> torch.Tensor:
    return value.as_subclass(torch.Tensor)


def _wide(offsets: Any) -> Any:
    """Return offsets in 64 bits: torch adds a scalar of 64 bits to 32 bits in 32 bits."""
    return offsets.long() if isinstance(offsets, torch.Tensor) else offsets


# Addresses of a tensor's storage begin at its number times this.
_APART = 1 << 40


class Pointer:
    """Addresses of numbers of one type: one or many, possibly in several tensors."""

    def __init__(self, storages: list[torch.Tensor], dtype: torch.dtype, addresses: Any) -> None:
        self.storages, self.addresses = storages, addresses
        self.dtype = SimpleNamespace(element_ty=dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor, storages: list[torch.Tensor]) -> Pointer:
        address = len(storages) * _APART + tensor.storage_offset()
        storages.append(torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()))
        return cls(storages, tensor.dtype, _value(torch.tensor(address)))

    def at(self, addresses: Any) -> Pointer:
        return Pointer(self.storages, self.dtype.element_ty, addresses)

    def __add__(self, other: Any) -> Pointer:
        return self.at(self.addresses + _wide(other))

    def __sub__(self, other: Any) -> Pointer:
        return self.at(self.addresses - _wide(other))

    def __getitem__(self, item: Any) -> Pointer:
        return self.at(self.addresses[item])

    def parts(self, mask: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each tensor, the addresses that are in it, as mask, and their places; none may be outside."""
        addresses = _plain(self.addresses)
        mask = _plain(torch.as_tensor(True if mask is None else mask)).expand(addresses.shape)
        for number in (addresses[mask] // _APART).unique().tolist():
            storage = self.storages[number]
            inside = mask & (addresses // _APART == number)
            places = addresses[inside] % _APART
            assert storage.dtype == self.dtype.element_ty
            assert (places < len(storage)).all(), "an address beyond its tensor"
            yield storage, inside, places


class Shared:
    """Part of shared memory: its storage, the record of accesses to it, and the place of each element."""

    def __init__(self, storage: torch.Tensor, record: Record, places: torch.Tensor) -> None:
        self.storage, self.record, self.places = storage, record, places
        self.dtype, self.shape = storage.dtype, places.shape

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        places = _places(shape, layout)
        storage = torch.full((places.numel(),), torch.nan, dtype=dtype)
        return cls(storage, Record(storage.nbytes // 2), places)

    def index(self, number: Any) -> Shared:
        return Shared(self.storage, self.record, self.places[int(number)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.storage, self.record, self.places.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.storage, self.record, self.places.permute(order))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        storage = self.storage.view(dtype)
        places = _places(shape, layout)
        assert self.places.numel() == len(self.storage), "no kernel reinterprets a part"
        assert places.numel() == len(storage), "no kernel reinterprets memory as of another size"
        return Shared(storage, self.record, places)

    @property
    def units(self) -> torch.Tensor:
        """Numbers of the two-byte units of these elements."""
        each = self.storage.itemsize // 2
        return (self.places.flatten()[:, None] * each + torch.arange(each)).flatten()

    def load(self, layout: Any = None) -> Any:
        self.record.read(_own.partition, ITSELF, self.units)
        return _value(self.storage[self.places])

    def store(self, value: Any, kind: int = ITSELF) -> None:
        assert value.shape == self.shape, f"{tuple(value.shape)} is stored into {tuple(self.shape)}"
        self.record.write(_own.partition, kind, self.units)
        self.storage[self.places] = _plain(value).to(self.dtype)


def _places(shape: list[int], layout: Any) -> torch.Tensor:
    """Return where elements are: products read blocks of columns, as wide as the swizzle."""
    shape = [int(size) for size in shape]
    places = torch.arange(torch.Size(shape).numel())
    if not isinstance(layout, gluon.NVMMASharedLayout):
        return places.view(shape)
    *outer, rows, columns = shape
    width = min(layout.swizzle_byte_width * 8 // layout.element_bitwidth, columns)
    blocked = places.view(*outer, columns // width, rows, width)
    return blocked.transpose(-3, -2).reshape(shape)


class Cell:
    """Barrier: the arrivals that it still waits for, its phase, and what has been told to it."""

    count, left, phase = 0, 0, 0

    def __init__(self) -> None:
        # What those who arrive tell is known to those who wait once the phase has ended.
        self.told, self.known = Knowledge(), Knowledge()


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, team: Team, cells: list[Cell]) -> None:
        self.team, self.cells = team, cells

    def index(self, number: Any) -> Barriers:
        return Barriers(self.team, [self.cells[int(number)]])

    def init(self, count: int) -> None:
        self.cells[0].count = self.cells[0].left = count

    def arrive(self, count: int = 1, pred: Any = True) -> None:
        if pred:
            _own.partition.tell(self.cells[0].told)
            self.team.arrive(self.cells[0], count)

    def wait(self, phase: Any) -> None:
        self.team.wait(self.cells[0], int(phase))
        _own.partition.add(self.cells[0].known)


class Team:
    """The partitions of a program, of which one runs until it waits for another."""

    def __init__(self, program: int, programs: int) -> None:
        self.program, self.programs = program, programs
        self.turn = threading.Condition()
        self.alive, self.error = 0, None
        # By thread: the barrier and the phase whose end it waits for.
        self.waiting: dict[int, tuple[Cell, int]] = {}

    def arrive(self, cell: Cell, count: int) -> None:
        cell.left -= count
        assert cell.left >= 0, "more arrivals at a barrier than it counts"
        if cell.left == 0:
            cell.left, cell.phase = cell.count, cell.phase ^ 1
            cell.known.add(cell.told)
            self.turn.notify_all()

    def wait(self, cell: Cell, phase: int) -> None:
        self.waiting[threading.get_ident()] = cell, phase
        while cell.phase == phase:
            self.check()
            if self.error is not None:
                raise self.error
            self.turn.wait()
        del self.waiting[threading.get_ident()]

    def check(self) -> None:
        """End the program if every partition waits for a barrier at which nobody arrives any more."""
        pairs = self.waiting.values()
        if 0 < len(pairs) == self.alive and all(cell.phase == phase for cell, phase in pairs):
            self.error = self.error or RuntimeError("every partition waits for another one")
            self.turn.notify_all()

    def run(self, partitions: list[tuple[Any, tuple[Any, ...]]]) -> None:
        def work(number: int, function: Any, arguments: tuple[Any, ...]) -> None:
            with self.turn, torch.no_grad():
                _begin(self, number)
                try:
                    function(*arguments)
                    assert not _own.products, "products that nobody waits for"
                except BaseException as error:
                    self.error = self.error or error
                self.alive -= 1
                self.check()
                self.turn.notify_all()

        threads = [
            threading.Thread(target=work, args=(number, *partition))
            for number, partition in enumerate(partitions)
        ]
        self.alive = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


def _begin(team: Team, number: int = 0) -> None:
    """Start a partition: it has no outstanding copies and products."""
    _own.team, _own.partition, _own.products = team, Partition(number), deque()


class Product:
    """A product that runs: its operands are read when the kernel waits for it, and not earlier."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: Any) -> None:
        self.operands, self.value = (a, b, acc if use_acc else None), None
        self.number = _own.partition.start_product()
        for operand in (a, b):
            if isinstance(operand, Shared):
                operand.record.read(_own.partition, PRODUCTS, operand.units)

    def finish(self) -> None:
        a, b, acc = self.operands
        _own.partition.end_product(self.number)
        first, second = (_value(x.storage[x.places]) if isinstance(x, Shared) else x for x in (a, b))
        assert first.dtype == second.dtype, "operands of two types"
        self.value = first.float() @ second.float()
        if acc is not None:
            self.value = self.value + (acc.value if isinstance(acc, Product) else acc)


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc, use_acc)
    _own.products.append(product)
    return product if is_async else _wait_for_products(0, (product,))


def _wait_for_products(outstanding: int = 0, deps: tuple[Any, ...] = ()) -> Any:
    while len(_own.products) > outstanding:
        _own.products.popleft().finish()
    # A product that still runs stays one: whoever computes with it fails.
    results = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
    return results[0] if len(results) == 1 else results


def _copy(target: Shared, source: Pointer, mask: Any = None) -> None:
    target.store(_load(source, mask, 0), COPIES)


def _arrive_with_copies(barrier: Barriers, increment_count: bool) -> None:
    assert not increment_count, "no kernel counts copies at the barrier"
    _own.partition.tell_of_copies(barrier.cells[0].told)
    barrier.team.arrive(barrier.cells[0], _COPYING)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    found = torch.full(pointer.addresses.shape, other, dtype=pointer.dtype.element_ty)
    for storage, inside, places in pointer.parts(mask):
        found[inside] = storage[places]
    return _value(found)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    value = torch.broadcast_to(torch.as_tensor(value), pointer.addresses.shape)
    for storage, inside, places in pointer.parts(mask):
        storage[places] = _plain(value[inside]).to(storage.dtype)


def _add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "") -> None:
    for storage, inside, places in pointer.parts(mask):
        storage.index_put_((places,), _plain(value[inside]), accumulate=True)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        return a.at(torch.where(condition, a.addresses, b.addresses))
    return torch.where(condition, a, b)


def _assembly(text: str, _constraints: str, arguments: list[Any], **_: Any) -> Any:
    if "ex2.approx.ftz" in text:
        power = torch.exp2(arguments[0])
        return torch.where(power < torch.finfo(torch.float32).tiny, 0.0, power)
    assert "mov.b32" in text, text
    return arguments[0]


def _minimum(a: Any, b: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Any:
    smaller = torch.minimum if propagate_nan == tl.PropagateNan.ALL else torch.fmin
    return smaller(a, torch.as_tensor(b, dtype=a.dtype))


def _numbers(*bounds: Any) -> Iterator[Any]:
    """Yield the numbers of a loop as scalars of a kernel, which have methods."""
    return (_value(torch.tensor(number)) for number in range(*map(int, bounds)))


def _specialize(partitions: list[Any], _warps: Any, _registers: Any) -> None:
    _own.team.run(partitions)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, instructions.mbarrier.MBarrierLayout):
        return Barriers(_own.team, [Cell() for _ in range(shape[0])])
    return Shared.allocate(dtype, shape, layout)


_LANGUAGE = SimpleNamespace(
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    constexpr=lambda value: value,
    NVMMASharedLayout=gluon.NVMMASharedLayout,
    SwizzledSharedLayout=gluon.SwizzledSharedLayout,
    **dict.fromkeys(
        ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout"), lambda *_: None
    ),
    program_id=lambda axis: _value(torch.tensor(_own.team.program)),
    num_programs=lambda axis: _own.team.programs,
    cdiv=lambda a, b: -(-a // b),
    arange=lambda first, end, layout=None: _value(torch.arange(first, end, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: _value(torch.full(shape, value, dtype=dtype)),
    load=_load,
    store=_store,
    atomic_add=_add,
    where=_where,
    maximum=torch.fmax,
    minimum=_minimum,
    max=lambda x, axis: x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis),
    sum=lambda x, axis: x.sum(axis),
    log2=torch.log2,
    split=lambda x: (x[..., 0], x[..., 1]),
    join=lambda a, b: torch.stack((a, b), -1),
    reshape=lambda x, shape: x.reshape([int(size) for size in shape]),
    permute=lambda x, order: x.permute(order),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    multiple_of=lambda x, number: x,
    static_range=range,
    to_tensor=lambda x: x,
    inline_asm_elementwise=_assembly,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
)
_BARRIERS = SimpleNamespace(
    MBarrierLayout=instructions.mbarrier.MBarrierLayout,
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, phase: barrier.wait(phase),
    arrive=lambda barrier, **given: barrier.arrive(**given),
)
_STAND_INS = [
    (gluon, _LANGUAGE),
    (instructions.mbarrier, _BARRIERS),
    (instructions.async_copy, SimpleNamespace(mbarrier_arrive=_arrive_with_copies)),
    (instructions.fence_async_shared, lambda: _own.partition.fence()),
    (instructions.warpgroup_mma, _multiply),
    (instructions.warpgroup_mma_init, lambda acc: acc),
    (instructions.warpgroup_mma_wait, _wait_for_products),
    (hopper_common.load_asynchronously, _copy),
    (hopper_common.group_barrier, lambda: None),
    (hopper_common.seen_as, Shared.reinterpret),
]
_modules: dict[int, dict[str, Any]] = {}


def _function(kernel: GluonJITFunction[Any]) -> FunctionType:
    """Return a kernel's Python function, whose globals are stand-ins."""
    source = kernel.fn
    names = _names_of(source.__globals__)
    return FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)


def _names_of(module: dict[str, Any]) -> dict[str, Any]:
    """Return the names of a module, whose kernels and instructions are stand-ins."""
    names = _modules.get(id(module))
    if names is None:
        names = _modules[id(module)] = {}
        names.update((name, _stand_in(found)) for name, found in module.items())
        names["range"] = _numbers
    return names


@contextmanager
def changed(kernel: GluonJITFunction[Any], definition: ast.Module) -> Iterator[None]:
    """Run another definition of a function in place of the one that its module's kernels call."""
    names, name = _names_of(kernel.fn.__globals__), kernel.fn.__name__
    before = names[name]
    exec(compile(definition, f"<changed {name}>", "exec"), names)
    try:
        yield
    finally:
        names[name] = before


def _stand_in(found: Any) -> Any:
    for real, instead in _STAND_INS:
        if found is real:
            return instead
    if isinstance(found, GluonJITFunction):
        return _function(found)
    if isinstance(found, gluon.constexpr):
        return found.value
    return found


def on_grid(kernel: Any, programs: int) -> Any:
    """Return a function that runs a Gluon kernel for each program, as :func:`launch.on_grid` launches it."""
    function = _function(kernel)

    def run(*arguments: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
        memory: list[torch.Tensor] = []
        given = [Pointer.of(x, memory) if isinstance(x, torch.Tensor) else x for x in arguments]
        with torch.no_grad():
            for program in range(programs):
                _begin(Team(program, programs))
                function(*given, **constants)

    return run
