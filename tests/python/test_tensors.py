"""Tensors through the codec, without an agent: only their elements travel, and an ordinary tensor arrives."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorferry._C import _testing

codec = _testing.Codec()

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTISED = [d for d in DTYPES if str(d).startswith(("torch.qint", "torch.quint"))]
# Bits and sub-byte integers have no operators of torch's to fill or compare them with.
OPAQUE = [
    d
    for d in DTYPES
    if str(d).startswith("torch.bits") or str(d) in {f"torch.{s}int{n}" for s in ("", "u") for n in range(1, 8)}
]
PLAIN = [d for d in DTYPES if d not in QUANTISED and d not in OPAQUE]


def there_and_back(value):
    return codec.decode(codec.encode(value))


def sent_bytes(value) -> int:
    return sum(len(buffer) for buffer in codec.encode(value).buffers)


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a strided tensor in row-major order, as bytes."""
    plain = (
        tensor.detach().resolve_conj().resolve_neg() if tensor.dtype.is_complex or tensor.is_neg() else tensor.detach()
    )
    return plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).view(shape) if dtype is not torch.uint8 else raw.view(shape)


def check(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.device, got.layout) == (sent.dtype, sent.shape, sent.device, sent.layout)
    assert got.requires_grad == sent.requires_grad
    assert got.is_leaf
    assert got.is_conj() == sent.is_conj() and got.is_neg() == sent.is_neg()
    assert bits(got) == bits(sent)


# ---- Tensors round-trip


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_round_trips(dtype):
    for shape in ((), (0,), (1,), (5,), (3, 4), (2, 0, 3), (30, 40, 5)):
        sent = filled(dtype, *shape)
        got = there_and_back(sent)
        check(got, sent)
        assert got.stride() == sent.stride()
    column = filled(dtype, 6, 7)[:, 2]
    check(there_and_back(column), column)


@pytest.mark.parametrize("dtype", OPAQUE, ids=str)
def test_dtypes_without_operators(dtype):
    sent = torch.empty(3, dtype=dtype)
    got = there_and_back(sent)
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.untyped_storage().tolist() == sent.untyped_storage().tolist()


def test_memory_formats_survive():
    image = torch.randn(2, 3, 4, 5)
    volume = torch.randn(2, 3, 4, 5, 6)
    for sent, form in (
        (image, torch.contiguous_format),
        (image.to(memory_format=torch.channels_last), torch.channels_last),
        (volume.to(memory_format=torch.channels_last_3d), torch.channels_last_3d),
    ):
        got = there_and_back(sent)
        check(got, sent)
        assert got.stride() == sent.stride()
        assert got.is_contiguous(memory_format=form)


def test_a_view_with_gaps_keeps_the_order_of_its_strides():
    sent = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)[:, ::2]
    got = there_and_back(sent)
    check(got, sent)
    assert got.is_contiguous(memory_format=torch.channels_last)
    sent = torch.randn(6, 8).t()[:, 1:3]
    got = there_and_back(sent)
    check(got, sent)
    assert got.t().is_contiguous()


VIEWS = {
    "slice of rows": lambda m: m[2:5],
    "one row": lambda m: m[3],
    "one element": lambda m: m[3, 4],
    "transposed": lambda m: m.t(),
    "column": lambda m: m[:, 3],
    "block": lambda m: m[1:4, 2:5],
    "every other": lambda m: m[::2, ::3],
    "reshaped": lambda m: m.view(-1),
    "expanded": lambda m: m[:1].expand(50, 8),
    "expanded column": lambda m: m[:, :1].expand(10, 50),
    "expanded element": lambda m: m[0, 0].expand(1000),
    "windows": lambda m: m.view(-1).unfold(0, 5, 1),
    "windows with gaps": lambda m: m.view(-1).unfold(0, 2, 3),
    "diagonal": lambda m: m.diagonal(),
    "nothing": lambda m: m[5:5],
    "unsqueezed": lambda m: m[2:4, None, :, None],
    "permuted": lambda m: m.view(2, 5, 8).permute(2, 0, 1),
    "self-overlapping": lambda m: m.as_strided((3, 4), (1, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool, torch.float8_e5m2], ids=str)
def test_views_send_only_their_elements(name, dtype):
    matrix = filled(dtype, 10, 8)
    sent = VIEWS[name](matrix)
    check(there_and_back(sent), sent)
    elements = torch.arange(80).view(10, 8)
    distinct = VIEWS[name](elements).unique().numel()
    assert sent_bytes(sent) == distinct * dtype.itemsize


def test_a_column_of_a_large_matrix_does_not_send_the_matrix():
    matrix = torch.randn(1000, 1000)
    assert sent_bytes(matrix[:, 7]) == 4000
    got = there_and_back(matrix[:, 7])
    assert got.untyped_storage().nbytes() == 4000
    assert got.equal(matrix[:, 7])


def test_views_without_gaps_are_sent_without_a_copy():
    matrix = torch.randn(100, 100)
    for view in (matrix, matrix[10:20], matrix.t(), matrix[:1].expand(30, 100)):
        assert codec.encode(view).addresses == [view.data_ptr()]


@st.composite
def views(draw):
    dimensions = draw(st.integers(0, 4))
    sizes = [draw(st.integers(0, 4)) for _ in range(dimensions)]
    strides = [draw(st.integers(0, 12)) for _ in range(dimensions)]
    offset = draw(st.integers(0, 5))
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides) if size)
    storage = torch.arange(last + 1 + draw(st.integers(0, 5)), dtype=draw(st.sampled_from([torch.int32, torch.int8])))
    return storage.as_strided(sizes, strides, offset)


@settings(max_examples=500)
@given(views())
def test_any_strided_view_round_trips(sent):
    got = there_and_back(sent)
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert got.tolist() == sent.tolist()
    distinct = sent.unique().numel()
    bytes_sent = sent_bytes(sent)
    # Overlapping views that are not found to be without gaps are copied, overlaps and all.
    assert distinct * sent.itemsize <= bytes_sent <= max(sent.numel(), 0) * sent.itemsize
    if distinct == sent.numel():
        assert bytes_sent == distinct * sent.itemsize


@settings(max_examples=300)
@given(st.data())
def test_views_of_one_storage_round_trip_together(data):
    storage = torch.arange(60, dtype=torch.int32)
    sent = []
    for _ in range(data.draw(st.integers(1, 5))):
        sizes = [data.draw(st.integers(0, 4)) for _ in range(data.draw(st.integers(0, 2)))]
        strides = [data.draw(st.integers(0, 6)) for _ in sizes]
        sent.append(storage.as_strided(sizes, strides, data.draw(st.integers(0, 10))))
    got = there_and_back(sent)
    for g, s in zip(got, sent):
        assert g.tolist() == s.tolist() and g.shape == s.shape
    # What overlaps without gaps shares memory: a write through one shows in the others, as it does here.
    whole = data.draw(st.booleans())
    if whole:
        got = there_and_back([*sent, storage])
        at = data.draw(st.integers(0, 59))
        got[-1][at] = -1
        storage[at] = -1
        for g, s in zip(got, sent):
            assert g.tolist() == s.tolist()


def test_conjugate_and_negative_views_keep_their_bits():
    z = torch.randn(3, 4, dtype=torch.complex64)
    for sent in (z.conj(), z.conj().imag, z.conj()[:, 1], torch._neg_view(torch.randn(3)), z.mH, z.conj().t()[1:]):
        check(there_and_back(sent), sent)
    assert codec.encode(z.conj()).addresses == [z.data_ptr()]


def test_a_zero_tensor_of_autograds_arrives_as_zeros():
    got = there_and_back(torch._efficientzerotensor((3, 4)))
    assert got.tolist() == torch.zeros(3, 4).tolist()
    got[0, 0] = 1


def test_meta_tensors_travel_without_bytes():
    sent = torch.empty(3, 4, device="meta", dtype=torch.bfloat16)
    got = there_and_back([sent])[0]
    assert (got.device, got.dtype, got.shape, got.stride()) == (sent.device, sent.dtype, sent.shape, sent.stride())
    assert sent_bytes(sent) == 0


# ---- Autograd, parameters, classes


def test_requires_grad_survives_as_a_leaf():
    leaf = torch.randn(3, requires_grad=True)
    for sent in (leaf, leaf * 2, leaf.exp().view(3, 1), torch.randn(2, dtype=torch.complex64, requires_grad=True)):
        got = there_and_back(sent)
        assert got.requires_grad and got.is_leaf and got.grad_fn is None
        assert bits(got) == bits(sent)
        got.abs().sum().backward()
        assert got.grad is not None
    assert leaf.grad is None
    assert not there_and_back(leaf.detach()).requires_grad


@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: [v, {1, 2}.union], lambda v: {"key": v}], ids=["bare", "pickled", "dict"]
)
def test_parameters_stay_parameters(wrap):
    for sent in (
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.randn(3), requires_grad=False),
        torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False),
        torch.nn.Parameter(torch.randn(4, 5)[:, 1]),
        torch.nn.Parameter(torch.randn(4, 5).t()),
    ):
        got = there_and_back(wrap(sent))
        while type(got) in (list, dict):
            got = got[0] if type(got) is list else got["key"]
        check(got, sent)
        assert type(got) is torch.nn.Parameter


def test_buffers_of_modules_stay_buffers():
    for persistent in (True, False):
        got = there_and_back(torch.nn.Buffer(torch.randn(3), persistent=persistent))
        assert isinstance(got, torch.nn.Buffer)
        assert got.persistent is persistent


def test_attributes_travel():
    tensor = torch.randn(100, 100)
    tensor.tag = {"name": "t"}
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.shard = 3
    got, again, got_parameter = there_and_back((tensor, tensor, parameter))
    assert got is again
    assert got.tag == {"name": "t"} and got.equal(tensor)
    assert type(got_parameter) is torch.nn.Parameter and got_parameter.shard == 3
    assert sent_bytes([tensor]) == 40_000


class Tagged(torch.Tensor):
    pass


class Sharded(torch.nn.Parameter):
    pass


class Counted(torch.Tensor):
    __slots__ = ("count",)


def test_subclasses_stay_subclasses():
    matrix = torch.randn(100, 100)
    tagged = matrix.as_subclass(Tagged)
    tagged.tag = "x"
    got = there_and_back(tagged)
    assert type(got) is Tagged and got.tag == "x"
    assert got.as_subclass(torch.Tensor).equal(matrix)
    assert codec.encode(tagged).addresses == [matrix.data_ptr()]
    assert sent_bytes(tagged[:, 3]) == 400

    sharded = Sharded(torch.randn(4))
    got = there_and_back([sharded, sharded])
    assert type(got[0]) is Sharded and got[0] is got[1]
    assert got[0].requires_grad and got[0].is_leaf

    counted = torch.ones(2).as_subclass(Counted)
    counted.count = 7
    assert there_and_back(counted).count == 7


def test_subclasses_keep_their_own_pickling():
    uninitialised = torch.nn.parameter.UninitializedParameter()
    assert type(there_and_back(uninitialised)) is torch.nn.parameter.UninitializedParameter
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    got = there_and_back(jagged)
    assert type(got) is type(jagged) and got.layout == torch.jagged
    assert [part.tolist() for part in got.unbind()] == [[1, 1], [1, 1, 1]]


def test_storages_travel_and_share():
    tensor = torch.arange(10)
    got, untyped, typed = there_and_back((tensor, tensor.untyped_storage(), tensor._typed_storage()))
    assert type(untyped) is torch.UntypedStorage and type(typed) is torch.storage.TypedStorage
    assert typed.dtype == torch.int64
    assert got.data_ptr() == untyped.data_ptr() == typed._data_ptr()


# ---- Sharing


def test_tensors_that_share_a_whole_storage_share_it_in_any_order():
    base = torch.arange(100)
    row, column, every = base.view(10, 10)[3], base.view(10, 10)[:, 4], base[::7]
    for sent in (
        [base, row, column, every],
        [every, column, row, base],
        [row, {"x": column}, (base,), every],
        [column, base.view(20, 5), row, every],
    ):
        assert sent_bytes(sent) == 800
        flat = {}

        def collect(value, into=flat):
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, torch.Tensor):
                    into[tuple(item.shape), item.stride()] = item
                else:
                    collect(item)

        collect(there_and_back(sent))
        whole = next(t for t in flat.values() if t.numel() == 100)
        whole.view(-1)[34] = -1
        assert flat[(10,), (1,)][4] == -1  # the row
        assert flat[(10,), (10,)][3] == -1  # the column
        whole.view(-1)[35] = -2
        assert flat[(15,), (7,)][5] == -2


def test_identity_holds_between_arguments_and_inside_objects():
    base = torch.arange(6)
    encoded = codec.encode_request((base[:2], base[4:].clone()), {"whole": base}, None)
    assert [len(b) for b in encoded.buffers] == [48, 16]
    args, kwargs = codec.decode_request(encoded)
    kwargs["whole"][0] = 9
    assert args[0].tolist() == [9, 1]

    class_made = torch.nn.Module()
    class_made.part = base[1:3]
    encoded = codec.encode_request((base[:2], Holder(base[1:3])), {"whole": base}, None)
    assert [len(b) for b in encoded.buffers] == [48]
    args, kwargs = codec.decode_request(encoded)
    kwargs["whole"][1] = 9
    assert args[0][1] == 9 and args[1].value[0] == 9


class Holder:
    def __init__(self, value):
        self.value = value


def test_overlapping_parts_share_and_send_their_union_once():
    base = torch.arange(1000)
    sent = [base[100:200], base[150:300], base[300:400], base[120:180].view(6, 10)[:, 3]]
    encoded = codec.encode(sent)
    assert sorted(len(b) for b in encoded.buffers) == [800, 1600]
    got = there_and_back(sent)
    assert [g.tolist() for g in got] == [s.tolist() for s in sent]
    got[0][60] = -1
    assert got[1][10] == -1
    got[0][23] = -3
    assert got[3][0] == -3
    # What only touches stays apart.
    assert got[2].untyped_storage().data_ptr() != got[1].untyped_storage().data_ptr()


def test_views_of_other_dtypes_share():
    base = torch.zeros(8, dtype=torch.int64)
    sent = [base.view(torch.uint8)[3:30], base[1:3], base.view(torch.float16)[6:9]]
    got = there_and_back(sent)
    got[1][0] = 0x0101_0101_0101_0101
    assert got[0].tolist() == [0] * 5 + [1] * 8 + [0] * 14
    assert [g.dtype for g in got] == [s.dtype for s in sent]


def test_tied_parameters_stay_tied():
    weight = torch.nn.Parameter(torch.randn(4, 4))
    state = {"a.weight": weight, "b.weight": weight, "view": weight.data[1]}
    got = there_and_back(state)
    assert got["a.weight"] is got["b.weight"]
    assert got["view"].data_ptr() == got["a.weight"].data_ptr() + 16
    assert sent_bytes(state) == 64


def test_empty_tensors_of_one_storage_can_grow_separately():
    base = torch.arange(4)
    first, second = there_and_back([base[:0], base[4:]])
    first.resize_(2).fill_(1)
    second.resize_(2).fill_(2)
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2]


# ---- Sparse


def sparse_tensors():
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 0], [0, 0, 3]])
    yield "coo", dense.to_sparse()
    yield "uncoalesced", torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3))
    yield "hybrid", torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 4), (3, 4))
    yield "no elements", torch.sparse_coo_tensor(size=(3, 4))
    yield "bfloat16", dense.bfloat16().to_sparse()
    yield "complex", dense.to(torch.complex64).to_sparse()
    yield "bool", dense.bool().to_sparse()
    yield "csr", dense.to_sparse_csr()
    yield "csc", dense.to_sparse_csc()
    yield "bsr", torch.eye(4).to_sparse_bsr((2, 2))
    yield "bsc", torch.eye(4).to_sparse_bsc((2, 2))
    yield "batched csr", torch.stack([dense, dense]).to_sparse_csr()
    yield (
        "int32 indices",
        torch.sparse_csr_tensor(
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), [5.0], (1, 2)
        ),
    )


@pytest.mark.parametrize("name,sent", list(sparse_tensors()))
def test_sparse_tensors_travel_as_their_parts(name, sent):
    for got in (there_and_back(sent), there_and_back(Holder(sent)).value):
        assert got.layout == sent.layout and got.dtype == sent.dtype and got.shape == sent.shape
        if sent.layout == torch.sparse_coo:
            assert got.is_coalesced() == sent.is_coalesced()
            assert got._indices().equal(sent._indices()) and got._values().equal(sent._values())
        else:
            assert got.values().equal(sent.values())
            assert got.to_dense().equal(sent.to_dense())
    large = torch.sparse_coo_tensor([[5], [6]], [1.0], (10_000, 10_000))
    assert sent_bytes(large) == 8 + 8 + 4


def test_sparse_tensors_keep_requires_grad_and_parameters():
    sent = torch.eye(3).to_sparse().requires_grad_()
    got = there_and_back(sent)
    assert got.requires_grad and got.is_leaf
    assert type(there_and_back(torch.nn.Parameter(torch.eye(3).to_sparse()))) is torch.nn.Parameter


# ---- Tensors that cannot be sent


def test_quantised_tensors_are_refused():
    quantised = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    for value in (quantised, [Holder(quantised)]):
        with pytest.raises(TypeError, match=r"quantized.*dequantize"):
            codec.encode(value)


def test_nested_and_mkldnn_tensors_are_refused():
    with pytest.raises(TypeError, match=r"nested.*unbind"):
        codec.encode(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    if torch.backends.mkldnn.is_available():
        with pytest.raises(TypeError, match=r"_mkldnn.*to_dense"):
            codec.encode([torch.ones(3).to_mkldnn()])


def test_named_tensors_are_refused():
    try:
        named = torch.ones(2, names=("n",))
    except (TypeError, RuntimeError, AttributeError):
        pytest.skip("this torch has no named tensors")
    with pytest.raises(TypeError, match=r"named.*rename"):
        codec.encode(named)


def test_tensors_inside_a_transform_are_refused():
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.vmap(lambda row: codec.encode(row) and row)(torch.ones(2, 2))


def test_a_freed_storage_is_refused():
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="freed"):
        codec.encode(tensor)


# ---- Modes of the caller


def test_modes_of_the_caller_do_not_affect_sent_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    matrix = torch.randn(4, 5)
    sent = [matrix[:, 1], torch.eye(2).to_sparse(), matrix.untyped_storage()]
    for mode in (torch.no_grad(), torch.inference_mode(), FakeTensorMode(), torch.device("meta")):
        with mode:
            encoded = codec.encode(sent)
        column, sparse, _ = codec.decode(encoded)
        assert column.equal(matrix[:, 1]) and type(column) is torch.Tensor
        assert sparse.to_dense().equal(torch.eye(2))
    plain = codec.encode(sent)
    for mode in (torch.no_grad(), FakeTensorMode(), torch.device("meta")):
        with mode:
            got = codec.decode(plain)
        assert type(got[0]) is torch.Tensor and got[0].device.type == "cpu"
        assert got[0].equal(matrix[:, 1])
    with torch.inference_mode():
        assert codec.decode(plain)[0].is_inference()


def test_copying_a_view_leaves_no_trace_in_autograd():
    leaf = torch.randn(4, 5, requires_grad=True)
    versions = leaf._version
    codec.encode([leaf[:, 1], leaf])
    assert leaf._version == versions and leaf.grad_fn is None


# ---- Received tensors are ordinary


@pytest.fixture(params=["small", "large", "view", "shared"])
def received(request):
    if request.param == "shared":
        base = torch.arange(3000.0)
        return there_and_back([base[1000:], base])[0]
    sent = {
        "small": torch.arange(12.0),
        "large": torch.arange(300_000.0),
        "view": torch.arange(24.0).view(12, 2)[:, 0],
    }[request.param]
    return there_and_back(sent)


def test_received_tensors_can_be_written(received):
    expected = received.clone()
    received.mul_(2).add_(1)
    received[3] = 7
    expected = expected * 2 + 1
    expected[3] = 7
    assert received.equal(expected)
    received.zero_()
    assert received.sum() == 0


def test_received_tensors_can_be_resized(received):
    expected = received.tolist()
    count = received.numel()
    received.resize_(count * 3)
    assert received[:count].tolist() == expected
    received.resize_(2)
    assert received.tolist() == expected[:2]
    received.untyped_storage().resize_(0)


def test_received_tensors_can_be_pickled_saved_and_copied(received):
    for got in (
        pickle.loads(pickle.dumps(received)),
        copy.deepcopy(received),
        received.clone(),
        codec.decode(codec.encode(received)),
    ):
        assert got.equal(received)
    file = io.BytesIO()
    torch.save(received, file)
    file.seek(0)
    assert torch.load(file).equal(received)


def test_received_tensors_can_be_shared_with_a_child(received):
    received.share_memory_()
    assert received.is_shared()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=received[:4].fill_, args=(-5,))  # few: no threads of OpenMP's after a fork
    child.start()
    child.join(60)
    assert received[:5].tolist()[:4] == [-5] * 4
    assert received[4] != -5


def test_received_tensors_share_memory_with_numpy(received):
    array = received.numpy()
    array[0] = 42
    assert received[0] == 42


def test_received_tensors_can_be_swapped_and_set(received):
    expected = received.clone()
    other = torch.zeros(3)
    other.set_(received)
    assert other.equal(expected)
    received.data = torch.ones(2)
    assert other.equal(expected)


def test_a_received_tensor_releases_its_memory():
    gc.collect()
    before = codec.held_bytes()
    got = there_and_back(torch.arange(100_000))
    row = got.view(100, 1000)[50]
    assert codec.held_bytes() >= before + 800_000
    del got
    gc.collect()
    assert row[0] == 50_000
    assert codec.held_bytes() >= before + 800_000
    del row
    gc.collect()
    assert codec.held_bytes() == before


def test_a_received_tensor_outlives_its_codec():
    own = _testing.Codec()
    got = own.decode(own.encode(torch.arange(100_000)))
    del own
    gc.collect()
    assert got[-1] == 99_999
    got += 1


def test_a_sent_storage_is_kept_until_its_release():
    sent = torch.arange(100_000)
    encoded = codec.encode([sent[10:], torch.from_numpy(np.arange(9000))])
    del sent
    gc.collect()
    first, second = codec.decode(encoded)
    assert first[0] == 10 and second[-1] == 8999


def test_received_tensors_survive_the_interpreters_end():
    script = """
        import builtins, torch
        from tensorferry._C import _testing
        codec = _testing.Codec()
        builtins.kept = codec.decode(codec.encode([torch.arange(100_000), torch.nn.Parameter(torch.ones(3))]))
        torch.kept = codec.encode([torch.arange(100_000)[5:], kept])
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
