"""`fastemb.nn.Embedding` and `EmbeddingBag` in the place of torch's: values, options, interface."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fastemb
from fastemb import _memory
from fastemb import nn as fnn

LOW = [torch.float16, torch.bfloat16]
PAIRS = [(fnn.Embedding, nn.Embedding), (fnn.EmbeddingBag, nn.EmbeddingBag)]
pairs = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["Embedding", "EmbeddingBag"])
both = pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
IDS = torch.tensor([[1, 2, 2], [4, 1, 0]])


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.layout != torch.strided else grad


def twins(ours: type, theirs: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Modules with the same table."""
    a, b = ours(*args, **kwargs), theirs(*args, **kwargs)
    a.load_state_dict(b.state_dict())
    return a, b


def compare(a: Any, b: Any, *inputs: Any, tolerance: float = 2e-6) -> None:
    """Same outputs, gradients and tables, or as near as another order of additions gets."""
    x, y = a(*inputs), b(*inputs)
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    g = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    x.backward(g)
    y.backward(g)
    torch.testing.assert_close(dense(a.weight.grad), dense(b.weight.grad), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.weight, b.weight, rtol=1e-5, atol=1e-6)


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"max_norm": 1.0},
        {"max_norm": 0.7, "norm_type": 1.0},
        {"max_norm": 0.7, "norm_type": 3.0, "padding_idx": 1},
        {"scale_grad_by_freq": True},
        {"sparse": True, "padding_idx": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2), (0,), (2, 0)])
def test_embedding_options(shape: tuple[int, ...], options: dict, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = twins(fnn.Embedding, nn.Embedding, 5, 3, dtype=dtype, **options)
    assert a.padding_idx == b.padding_idx
    if options.get("sparse") and not shape:
        a(torch.tensor(3)).sum().backward()  # torch fails here
        assert a.weight.grad.to_dense().sum(1).tolist() == [0, 0, 0, 3, 0]
        return
    compare(a, b, torch.randint(0, 5, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"max_norm": 1.0},
        {"max_norm": 0.7, "norm_type": 1.0},
        {"sparse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bag_options(mode: str, options: dict, dtype: torch.dtype) -> None:
    if mode == "max" and options.get("sparse"):
        pytest.skip("torch has no sparse gradient here")
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (12,))
    for inputs in (
        (ids.reshape(4, 3),),
        (ids, torch.tensor([0, 3, 3, 9])),
        (ids.int(), torch.tensor([0, 3, 3, 9], dtype=torch.int32)),
    ):
        compare(
            *twins(fnn.EmbeddingBag, nn.EmbeddingBag, 5, 3, mode=mode, dtype=dtype, **options),
            *inputs,
        )
    a, b = twins(
        fnn.EmbeddingBag,
        nn.EmbeddingBag,
        5,
        3,
        mode=mode,
        dtype=dtype,
        include_last_offset=True,
        **options,
    )
    compare(a, b, ids, torch.tensor([0, 3, 3, 12]))


def test_bag_with_weights() -> None:
    torch.manual_seed(0)
    a, b = twins(fnn.EmbeddingBag, nn.EmbeddingBag, 5, 3, mode="sum")
    x = torch.randn(2, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    a(IDS, per_sample_weights=x).square().sum().backward()
    b(IDS, per_sample_weights=y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(a.weight.grad, b.weight.grad)


# ---- beyond torch --------------------------------------------------------------------------------


def test_weighted_mean_divides_by_the_count() -> None:
    """The weighted sum over the number of ids, padding not counted; gradients of all inputs."""
    bag = fnn.EmbeddingBag(4, 2, mode="mean", padding_idx=3, dtype=torch.float64)
    ids, offsets = torch.tensor([0, 1, 3, 2]), torch.tensor([0, 3])
    samples = torch.tensor([2.0, 4.0, 100.0, 0.5], dtype=torch.float64, requires_grad=True)
    table = bag.weight.detach().clone().requires_grad_()
    expected = torch.stack([(2 * table[0] + 4 * table[1]) / 2, 0.5 * table[2]])
    output = bag(ids, offsets, samples)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(bag.weight.grad, table.grad)
    sums = table.detach().sum(1)
    torch.testing.assert_close(
        samples.grad, torch.stack([sums[0] / 2, sums[1] / 2, sums[0] * 0, sums[2]])
    )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_integer_types_mix(mode: str) -> None:
    bag = fnn.EmbeddingBag(5, 3, mode=mode)
    ids, offsets = torch.tensor([1, 2, 4, 4]), torch.tensor([0, 1])
    expected = bag(ids, offsets)
    assert torch.equal(bag(ids.int(), offsets), expected)
    assert torch.equal(bag(ids, offsets.int()), expected)


@both
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", LOW)
def test_gradients_of_low_precision_tables(kind: type, sparse: bool, dtype: torch.dtype) -> None:
    """A gradient that fp16 and bf16 cannot hold, and one that they would not reach by adding."""
    module = kind(3, 2, sparse=sparse, dtype=dtype, output_dtype=torch.float32)
    many = torch.zeros(3000, 1, dtype=torch.int64)
    many[0] = 2
    module(many).sum().backward()
    grad = dense(module.weight.grad)
    assert grad.dtype == torch.float32
    assert grad.tolist() == [[2999.0] * 2, [0.0] * 2, [1.0] * 2]
    module.weight.grad = None
    (module(many[:1]).sum() * 2.0**-30).backward()
    assert dense(module.weight.grad)[2].tolist() == [2.0**-30] * 2


@both
def test_sparse_gradients_name_each_row_once(kind: type) -> None:
    module = kind(6, 2, sparse=True)
    module(torch.tensor([[5, 2, 5], [0, 2, 2]])).sum().backward()
    grad = module.weight.grad
    assert grad.layout == torch.sparse_coo
    assert grad._indices().tolist() == [[0, 2, 5]]
    assert grad._values().shape == (3, 2)


@both
@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16, torch.float32, None])
def test_output_dtype(kind: type, output_dtype: torch.dtype | None) -> None:
    module = kind(5, 3, dtype=torch.float16, output_dtype=output_dtype)
    assert module(IDS).dtype == (output_dtype or torch.float16)
    assert ("output_dtype=torch.float32" in repr(module)) == (output_dtype == torch.float32)


def test_sums_are_rounded_once() -> None:
    table = torch.tensor([[2048.0], [1.0]]).half()
    ids = torch.tensor([[0] + [1] * 600])
    assert fnn.EmbeddingBag.from_pretrained(table, mode="sum")(ids).item() == 2648
    wide = fnn.EmbeddingBag.from_pretrained(table, mode="sum", output_dtype=torch.float32)
    assert wide(ids[:, :-1]).item() == 2647


def test_frequency_of_a_row_is_its_own() -> None:
    bag = fnn.EmbeddingBag(4, 3, mode="sum", scale_grad_by_freq=True)
    bag(torch.tensor([1, 1, 3]), torch.tensor([0])).sum().backward()
    assert bag.weight.grad[:, 0].tolist() == [0, 1, 0, 1]


def test_sparse_maximum() -> None:
    bag = fnn.EmbeddingBag(4, 2, mode="max", sparse=True)
    bag(IDS[:1]).sum().backward()
    other = fnn.EmbeddingBag.from_pretrained(bag.weight.detach(), freeze=False, mode="max")
    other(IDS[:1]).sum().backward()
    assert torch.equal(bag.weight.grad.to_dense(), other.weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_nothing(mode: str) -> None:
    bag = fnn.EmbeddingBag(4, 3, mode=mode)
    assert torch.equal(bag(torch.zeros(2, 0, dtype=torch.int64)), torch.zeros(2, 3))
    none = torch.zeros(0, dtype=torch.int64)
    assert bag(none, none).shape == (0, 3)
    assert bag(torch.tensor([0, 1]), none).shape == (0, 3)
    with_last = fnn.EmbeddingBag(4, 3, mode=mode, include_last_offset=True)
    assert with_last(torch.tensor([0, 1]), torch.tensor([0])).shape == (0, 3)


# ---- interface -----------------------------------------------------------------------------------


def test_positional_arguments() -> None:
    bag = fnn.EmbeddingBag(10, 3, 2.5, 1.0, False, "sum", True, None, True, 4, "cpu", torch.float64)
    same = nn.EmbeddingBag(10, 3, 2.5, 1.0, False, "sum", True, None, True, 4, "cpu", torch.float64)
    for name in nn.EmbeddingBag.__constants__:
        assert getattr(bag, name) == getattr(same, name), name
    assert bag.weight.dtype == torch.float64
    table = fnn.Embedding(10, 3, 1, 2.5, 1.0, True, True, None, True, "cpu", torch.float64)
    same = nn.Embedding(10, 3, 1, 2.5, 1.0, True, True, None, True, "cpu", torch.float64)
    for name in nn.Embedding.__constants__:
        assert getattr(table, name) == getattr(same, name), name
    assert not table.weight.requires_grad
    assert isinstance(bag, nn.EmbeddingBag)
    assert isinstance(table, nn.Embedding)


@pairs
def test_looks_like_torch(ours: type, theirs: type) -> None:
    torch.manual_seed(0)
    a = ours(10, 3, padding_idx=4, max_norm=2.5)
    torch.manual_seed(0)
    b = theirs(10, 3, padding_idx=4, max_norm=2.5)
    assert repr(a) == repr(b)
    assert torch.equal(a.weight, b.weight)  # the same numbers from the same seed
    assert a.weight[4].tolist() == [0, 0, 0]
    assert [name for name, _ in a.named_parameters()] == ["weight"]
    assert not list(a.buffers())


def test_calls_by_keyword() -> None:
    bag = fnn.EmbeddingBag(5, 3, mode="sum")
    output = bag(
        input=torch.tensor([1, 2]), offsets=torch.tensor([0, 2]), per_sample_weights=torch.ones(2)
    )
    assert output.shape == (2, 3)
    assert fnn.Embedding(5, 3)(input=torch.tensor(1)).shape == (3,)


@pairs
def test_from_pretrained(ours: type, theirs: type) -> None:
    table = torch.randn(5, 3)
    options = {"padding_idx": 1, "max_norm": 5.0, "sparse": True}
    a = ours.from_pretrained(table, **options, output_dtype=torch.float64, table="t")
    b = theirs.from_pretrained(table, **options)
    assert a.weight.data_ptr() == table.data_ptr()
    assert not a.weight.requires_grad
    assert (a.padding_idx, a.max_norm, a.sparse) == (b.padding_idx, b.max_norm, b.sparse)
    assert (a.output_dtype, a.table) == (torch.float64, "t")
    assert ours.from_pretrained(table, False).weight.requires_grad
    half = ours.from_pretrained(table.half(), freeze=False)
    assert half.weight.grad_dtype == torch.float32


@pairs
def test_state_dict_both_ways(ours: type, theirs: type) -> None:
    a, b = ours(5, 3, padding_idx=1), theirs(5, 3, padding_idx=1)
    assert list(a.state_dict()) == ["weight"]
    b.load_state_dict(a.state_dict(), strict=True)
    assert torch.equal(a.weight, b.weight)
    buffer = io.BytesIO()
    torch.save(b.state_dict(), buffer)
    buffer.seek(0)
    c = ours(5, 3, padding_idx=1)
    c.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(c.weight, b.weight)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        c.load_state_dict({"weight": torch.ones(4, 3)})


@both
def test_copies(kind: type) -> None:
    module = kind(5, 3, padding_idx=1, dtype=torch.float16, output_dtype=torch.float32, table="t")
    expected = module(IDS)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(IDS), expected)
        assert (other.padding_idx, other.output_dtype, other.table) == (1, torch.float32, "t")
        with torch.no_grad():
            other.weight.add_(1)
        assert torch.equal(module(IDS), expected)


@both
def test_functional_call(kind: type) -> None:
    module = kind(5, 3)
    table = torch.randn(5, 3, requires_grad=True)
    output = torch.func.functional_call(module, {"weight": table}, (IDS,))
    assert torch.equal(output, kind.from_pretrained(table.detach())(IDS))
    output.sum().backward()
    assert table.grad is not None
    assert module.weight.grad is None


@both
def test_subclass_with_other_arguments(kind: type) -> None:
    class Mine(kind):
        def __init__(self) -> None:
            super().__init__(5, 3)

    assert Mine()(IDS).shape[-1] == 3


@pairs
def test_from_pretrained_of_a_subclass(ours: type, theirs: type) -> None:
    for base in (ours, theirs):  # torch gives sizes by name, and options of its own alone

        class Swapped(base):
            def __init__(self, embedding_dim: int, num_embeddings: int, **options: Any) -> None:
                assert set(options) <= set(inspect.signature(theirs).parameters)
                super().__init__(num_embeddings, embedding_dim, **options)

        module = Swapped.from_pretrained(torch.ones(5, 3), padding_idx=1)
        assert (type(module), module.num_embeddings, module.padding_idx) == (Swapped, 5, 1)


@both
def test_symbolic_trace(kind: type) -> None:
    net = nn.Sequential(
        kind(5, 3, dtype=torch.float16, output_dtype=torch.float32), nn.Linear(3, 1)
    )
    traced = torch.fx.symbolic_trace(net)
    assert torch.equal(traced(IDS), net(IDS))
    traced(IDS).sum().backward()
    assert net[0].weight.grad.dtype == torch.float32
    # The saved code finds its function again, and the types of its arguments.
    again = pickle.loads(pickle.dumps(traced))
    assert torch.equal(again(IDS), net(IDS))
    alone = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(net[0])))
    assert torch.equal(alone(IDS), net[0](IDS))


@both
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_is_for_inputs_of_any_size(kind: type) -> None:
    module = kind(5, 3)
    traced = torch.jit.trace(module, (IDS,))
    assert torch.equal(traced(IDS.repeat(2, 3)), module(IDS.repeat(2, 3)))


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_leaves_tables_alone(kind: type, dtype: torch.dtype) -> None:
    module = kind(5, 3, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(IDS).dtype == dtype
        assert nn.Linear(3, 1)(module(IDS).float()).dtype == torch.bfloat16


@both
def test_no_grad_and_inference(kind: type) -> None:
    module = kind(5, 3, max_norm=0.5)
    with torch.no_grad():
        assert not module(IDS).requires_grad
    with torch.inference_mode():
        assert module(IDS).is_inference()


@both
@pytest.mark.parametrize("dim", [3, 1 << 20])  # of small and of recycled buffers
def test_output_can_be_resized(kind: type, dim: int) -> None:
    """As what torch makes: operators with out= resize it, and activations are freed this way."""
    module = kind(5, dim)
    with torch.no_grad():
        output, freed = module(IDS), module(IDS)
    with pytest.warns(UserWarning, match="was resized"):
        torch.cat([torch.ones(8, dim)], out=output)
    assert output.shape == (8, dim)
    assert output.sum() == 8 * dim
    freed.untyped_storage().resize_(0)
    assert freed.untyped_storage().nbytes() == 0


@both
def test_meta_device(kind: type) -> None:
    module = kind(5, 3, device="meta", dtype=torch.float16)
    assert module(torch.zeros(2, 3, dtype=torch.int64, device="meta")).device.type == "meta"
    module.to_empty(device="cpu")
    module.reset_parameters()
    module(IDS).sum().backward()
    assert module.weight.grad.dtype == torch.float32


@both
def test_default_dtype_and_device_context(kind: type) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert kind(5, 3).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    with torch.device("meta"):
        assert kind(5, 3).weight.is_meta


# ---- grad_dtype ----------------------------------------------------------------------------------


def _reassign(module: Any) -> Any:
    module.weight = nn.Parameter(module.weight.detach().clone())
    return module


def _assign(module: Any) -> Any:
    module.load_state_dict({"weight": module.weight.detach().clone()}, assign=True)
    return module


@both
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "lose",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: m.to_empty(device="meta").to_empty(device="cpu"),
        lambda m: m.double().half(),
        lambda m: m.double().bfloat16(),
        _assign,
        _reassign,
        lambda m: nn.Sequential(m).to(torch.float16)[0],
    ],
    ids=["deepcopy", "pickle", "to_empty", "half", "bfloat16", "assign", "reassign", "parent"],
)
def test_full_gradients_survive(kind: type, dtype: torch.dtype, lose: Any) -> None:
    module = lose(kind(5, 3, dtype=dtype))
    nn.init.ones_(module.weight)
    module(IDS).float().sum().backward()
    assert module.weight.dtype in LOW
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad_dtype == torch.float32


@both
def test_conversions_between_dtypes_with_a_gradient(kind: type) -> None:
    module = kind(5, 3)
    module.weight.grad = torch.full((5, 3), 2.0**-40)
    for dtype, grad in (
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ):
        module.to(dtype)
        assert module.weight.dtype == dtype
        assert module.weight.grad.dtype == grad
        assert module.weight.grad.unique().tolist() == [2.0**-40]
        module(IDS).sum().mul(0).backward()  # accumulates into it


@both
@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2])
def test_gradients_of_what_no_lookup_takes(kind: type, dtype: torch.dtype) -> None:
    """A head that shares the weight may: its gradients are those of torch."""
    module = kind(5, 3, dtype=torch.float16)
    module.weight.grad = torch.ones(5, 3)
    module.to(dtype)
    assert module.weight.grad.dtype == module.weight.grad_dtype == dtype


def test_gradient_that_was_there_before_grad_dtype() -> None:
    module = fnn.Embedding(5, 3)
    weight = nn.Parameter(torch.ones(5, 3, dtype=torch.float16))
    weight.grad = torch.ones(5, 3, dtype=torch.float16)
    module.weight = weight
    module(IDS).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad[2].tolist() == [3, 3, 3]


@pytest.mark.parametrize("fails", ["weight", "gradient", "buffer"])
@pytest.mark.parametrize("sparse", [False, True])
def test_failed_conversion_keeps_the_gradient(fails: str, sparse: bool) -> None:
    module = fnn.Embedding(5, 3, sparse=sparse)
    module.register_buffer("other", torch.ones(1))
    module(torch.tensor([1])).sum().backward()
    expected = dense(module.weight.grad).double()

    def fail(tensor: Tensor) -> Tensor:
        matrix = "weight" if tensor.requires_grad else "gradient"
        if fails == ("buffer" if tensor.dim() == 1 else matrix):
            raise RuntimeError("no")
        return tensor.double()

    with pytest.raises(RuntimeError, match="no"):
        module._apply(fail)
    # As in torch, what comes before a buffer has been converted.
    assert module.weight.dtype == (torch.float64 if fails == "buffer" else torch.float32)
    assert module.weight.grad.dtype == module.weight.dtype
    assert torch.equal(dense(module.weight.grad).double(), expected)


def test_a_sparse_gradient_cannot_be_shared() -> None:
    """As in torch, and it is still there."""
    module = fnn.Embedding(5, 3, sparse=True)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError):
        module.share_memory()
    assert module.weight.grad.to_dense().sum() == 3


def test_tied_head() -> None:
    """A linear layer over the same fp16 table: one FP32 gradient for both uses."""
    table = fnn.Embedding(5, 4, dtype=torch.float16)
    head = nn.Linear(4, 5, bias=False, dtype=torch.float16)
    head.weight = table.weight
    head(table(torch.tensor([1, 2]))).float().sum().backward()
    assert table.weight.grad.dtype == torch.float32
    assert bool((table.weight.grad != 0).any(1).all())


def test_tied_head_converted_with_a_gradient() -> None:
    """The head, a module of torch, converts the gradient once more; the next lookup undoes it."""
    model = nn.ModuleDict({"table": fnn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    weight = model["head"].weight = model["table"].weight
    weight.grad = torch.ones(5, 4)
    model.half()
    model["table"](torch.tensor([1])).float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert weight.grad.sum(1).tolist() == [4, 8, 4, 4, 4]


@both
def test_a_weight_that_is_computed_is_reset(kind: type) -> None:
    """As pruning and the old weight_norm compute it, before each lookup, from another parameter."""
    module = kind(5, 3)
    prune.random_unstructured(module, "weight", 0.5)
    module.reset_parameters()
    assert module(IDS).shape[-1] == 3


# ---- huge pages ----------------------------------------------------------------------------------


def huge_pages_work() -> bool:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read()
    except OSError:
        return False


def test_advice_about_pages() -> None:
    assert not _memory.advise_huge_pages(torch.empty(1000))
    assert not _memory.advise_huge_pages(torch.empty(4 << 20, device="meta"))
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert not _memory.advise_huge_pages(torch.empty(4 << 20))
    if huge_pages_work():
        assert _memory.advise_huge_pages(torch.empty(4 << 20))


@pytest.mark.skipif(not huge_pages_work(), reason="the kernel has no huge pages")
@both
def test_large_tables_lie_on_huge_pages(kind: type) -> None:
    """Asked before the first touch, at construction; the kernel says what it did."""
    module = kind(1 << 18, 16)  # 16 MiB

    def huge_kib(address: int) -> int:
        inside = False
        with open("/proc/self/smaps") as file:
            for line in file:
                head = line.split()[0]
                if "-" in head and not head.endswith(":"):
                    begin, end = (int(part, 16) for part in head.split("-"))
                    inside = begin <= address < end
                elif inside and head == "AnonHugePages:":
                    return int(line.split()[1])
        return 0

    middle = module.weight.data_ptr() + (8 << 20)
    assert huge_kib(middle) >= 2048


def test_nothing_happens_off_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    _memory._madvise.cache_clear()
    try:
        assert not _memory.advise_huge_pages(torch.empty(4 << 20))
        assert fnn.Embedding(1 << 18, 4)(IDS).shape == (2, 3, 4)
    finally:
        _memory._madvise.cache_clear()


def test_public_names() -> None:
    assert set(fastemb.nn.__all__) == {"Embedding", "EmbeddingBag"}
    assert fastemb.convert.__module__.startswith("fastemb")
    assert "embedding_bag" in fastemb.report()["operators"]
