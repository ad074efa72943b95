"""The executor itself: it computes what a GPU would, and it sees the mistakes that a GPU would not forgive."""

from pathlib import Path

import numpy as np
import pytest
import torch

from cuda_on_cpu import SCHEDULES, KernelError, Module, compiler, guarded

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
SAMPLES = Path(__file__).parent / "samples"
INTRIN = Path(__file__).parents[2] / "kernels" / "cuda" / "intrin.cuh"


def run(folder: Path, source: str, grid, block, args, **options) -> None:
    (folder / "k.cu").write_text(source)
    Module(folder / "k.cu").get_function("k")(grid, block, args, **options)


@pytest.mark.parametrize("name", ["gemv4", "gemv4_butterfly"])
def test_a_gemv_under_every_schedule(name) -> None:
    rows, out, group = 256, 72, 128
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (rows, out))
    words = sum(codes[i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    scale = random.uniform(0.01, 0.1, (rows // group, out)).astype(np.float16)
    zero = random.integers(4, 12, (rows // group, out)).astype(np.uint8)
    x = random.standard_normal(rows).astype(np.float16)
    weight = (codes - zero.astype(int).repeat(group, 0)) * scale.astype(float).repeat(group, 0)
    function = Module(SAMPLES / "gemv4.cu").get_function(name)
    grid = (-(-out // 32),) if name == "gemv4" else (-(-out * 32 // 256),)
    for order, seed in SCHEDULES:
        y = guarded(np.zeros(out, np.float32))
        args = (*map(guarded, (x, words, scale, zero)), y, *map(np.int32, (rows, out, group)))
        function(grid, (256,), args, shared_mem=2 * rows, order=order, seed=seed)
        np.testing.assert_allclose(y, x.astype(float) @ weight, atol=1e-3)


@pytest.mark.parametrize(("dtype", "instruction"), [(torch.float16, "mma_f16"), (torch.bfloat16, "mma_bf16")])
def test_a_tensor_core_tile(dtype, instruction) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(rows, 96, generator=generator).to(dtype) for rows in (128, 64))
    c = torch.zeros(128, 64)
    function = Module(SAMPLES / "tile_gemm.cu", options=[f"-DTENSOR={instruction}"]).get_function("tile_gemm")
    function((2, 2), (128,), (a, b, c, *map(np.int32, (128, 64, 96))))
    torch.testing.assert_close(c, (a.double() @ b.double().T).float(), rtol=1e-4, atol=1e-4)


def test_half_arithmetic_rounds_once(tmp_path) -> None:
    source = f"""#include "{INTRIN}"
    extern "C" __global__ void k(const u16* a, const u16* b, const u16* c, u16* o, int n) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i >= n) return;
      o[i] = (u16)fma_f16x2(a[i], 0x3c00, pair(b[i] ^ 0x8000, 0));
      o[n + i] = (u16)fma_f16x2(a[i], b[i], c[i]);
      o[2 * n + i] = f16_of_float(float_of_f16(a[i]) / float_of_f16(b[i]));
    }}"""
    random = np.random.default_rng(0)
    n = 20000
    a, b, c = ((random.standard_normal(n) * np.exp2(random.integers(-12, 9, n))).astype(np.float16) for _ in range(3))
    o = np.zeros((3, n), np.float16)
    run(tmp_path, source, (-(-n // 256),), (256,), (a, b, c, o, np.int32(n)))
    with np.errstate(over="ignore"):
        fused = (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float16)
        for got, expected in zip(o, (a - b, fused, a / b), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_bfloat16_conversion_is_torch_s(tmp_path) -> None:
    source = f"""#include "{INTRIN}"
    extern "C" __global__ void k(const float* x, u16* y, float* back, int n) {{
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) {{ y[i] = bf16_of_float(x[i]); back[i] = float_of_bf16(y[i]); }}
    }}"""
    x = torch.cat([torch.randn(996), torch.tensor([torch.inf, -torch.inf, 3.4e38, 1e-40])])
    y, back = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
    run(tmp_path, source, (4,), (256,), (x, y, back, np.int32(1000)))
    assert torch.equal(y, x.bfloat16())
    assert torch.equal(back, x.bfloat16().float())


def test_a_missing_barrier_is_seen_under_every_schedule(tmp_path) -> None:
    source = """extern "C" __global__ void k(const int* x, int* y) {
      __shared__ int s[64];
      s[threadIdx.x] = x[threadIdx.x];
      y[threadIdx.x] = s[63 - threadIdx.x];
    }"""
    x = np.arange(64, dtype=np.int32)
    for order, seed in SCHEDULES:
        y = np.zeros(64, np.int32)
        run(tmp_path, source, (1,), (64,), (x, y), order=order, seed=seed)
        assert not np.array_equal(y, x[::-1])


def test_a_missing_wait_for_an_asynchronous_copy_is_seen(tmp_path) -> None:
    source = f"""#include "{INTRIN}"
    extern "C" __global__ void k(const float4* x, float4* y) {{
      __shared__ __align__(16) float4 s[32];
      cp_async16(&s[threadIdx.x], x + threadIdx.x);
      cp_async_commit();
      WAIT
      __syncthreads();
      y[threadIdx.x] = s[31 - threadIdx.x];
    }}"""
    x = np.arange(128, dtype=np.float32).reshape(32, 4)
    for wait, right in (("cp_async_wait<0>();", True), ("", False)):
        y = np.zeros_like(x)
        run(tmp_path, source.replace("WAIT", wait), (1,), (32,), (x.view("V16"), y.view("V16")))
        assert np.array_equal(y, x[::-1]) == right


FAULTS = {
    "divergent": "if (threadIdx.x < 32) { __syncthreads(); y[0] = 1; } else {\n __syncthreads(); }",
    "deadlock": "if (threadIdx.x & 1) y[1] = __shfl_xor_sync(0xffffffffu, 1, 1);\n else __syncthreads();",
    "illegal memory access": "y[threadIdx.x + 1] = 1;",
    "outside its array": "__shared__ int s[8]; s[threadIdx.x % 9] = 1; y[0] = s[0];",
    "assertion failed": "assert(blockDim.x == 1); y[0] = 1;",
    "missing from the mask": "y[0] = __shfl_sync(1u, 5, 0);",
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_reported_and_survived(tmp_path, message) -> None:
    y = guarded(np.zeros(64, np.int32))
    with pytest.raises(KernelError, match=message):
        run(tmp_path, f'extern "C" __global__ void k(int* y) {{\n{FAULTS[message]}\n}}', (1,), (64,), (y,))
    run(tmp_path, 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = 7; }', (1,), (64,), (y,))
    assert (y == 7).all()


def test_sources_are_read_only(tmp_path) -> None:
    """Included files may lie anywhere: what is compiled is a copy, and the originals stay as they are."""
    header = tmp_path / "elsewhere" / "deep" / "two.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("#define TWO 2  // a comment\n")
    (tmp_path / "elsewhere" / "one.cuh").write_text('#include "deep/two.cuh"\n')
    y = np.zeros(1, np.int32)
    source = '#include "elsewhere/one.cuh"\n#include "ABSOLUTE"\nextern "C" __global__ void k(int* y) { y[0] = TWO; }'
    run(tmp_path, source.replace("ABSOLUTE", str(header)), (1,), (1,), (y,))
    assert y[0] == 2
    assert header.read_text() == "#define TWO 2  // a comment\n"


def test_source_that_does_not_compile(tmp_path) -> None:
    with pytest.raises(KernelError, match="does not compile"):
        run(tmp_path, 'extern "C" __global__ void k(int* y) { y = ; }', (1,), (1,), (np.zeros(1, np.int32),))


@pytest.mark.parametrize(
    "args",
    [
        (np.zeros(4, np.float64), np.int32(4)),
        (np.zeros(4, np.float32), 4),
        (np.zeros(4, np.float32),),
        (np.zeros(4, np.float32), np.float32(4)),
    ],
    ids=["wide elements", "python int", "one missing", "float for int"],
)
def test_wrong_arguments_are_refused(tmp_path, args) -> None:
    with pytest.raises(KernelError, match="argument"):
        run(tmp_path, 'extern "C" __global__ void k(float* y, int n) { }', (1,), (4,), args)


def test_shapes_templates_and_structs(tmp_path) -> None:
    source = """
    struct Dims { int n, m; };
    template <int A, bool B = (A > 3)>
    __global__ void __launch_bounds__((A + 4) * 8, 2) t(Dims d, int* y) {
      __shared__ int s; extern __shared__ int dynamic[];
      const int i = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      if (i == 0) s = A;
      dynamic[i] = B ? d.m : d.n;
      __syncthreads();
      const int odd = __syncthreads_count(i & 1);
      atomicAdd(&y[0], dynamic[i] + s);
      if (i == 0) { y[1] = odd; y[2] = gridDim.x * gridDim.y * gridDim.z; y[3 + blockIdx.z] = blockIdx.y; }
    }
    #define NAMED(n) extern "C" __global__ void named_##n(int* y) { y[0] = n; }
    NAMED(5)
    """
    (tmp_path / "k.cu").write_text(source)
    module = Module(tmp_path / "k.cu", names=["t<4>", "named_5"])
    y = np.zeros(8, np.int32)
    dims = np.array([(3, 10)], dtype=[("n", "i4"), ("m", "i4")])[0]
    module.get_function("t<4>")((1, 2, 2), (4, 3, 3), (dims, y), shared_mem=4 * 36, order="random", seed=3)
    assert y.tolist() == [4 * 36 * 14, 18, 4, 1, 1, 0, 0, 0]
    module.get_function("named_5")((1,), (1,), (y,))
    assert y[0] == 5


def test_guarded_tensors_keep_their_values() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.uint8):
        tensor = torch.arange(15).to(dtype).view(3, 5)
        assert torch.equal(guarded(tensor), tensor)
