"""What kernels become on an H200 at d20, compiled without one: Triton brings its own tools."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from maglev.ops import (  # noqa: E402
    fused_attention,
    fused_decode,
    fused_inject,
    fused_product,
    fused_read,
    fused_ring,
)

WIDTH, HEADS, HEAD_DIM, WINDOW, VOCAB = 1280, 10, 128, 512, 32_768


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def assembly(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str], warps: int) -> str:
    """PTX for compute capability 9.0; pointers are aligned to 16 bytes, as PyTorch's are."""
    return str(built(kernel, types, constants, aligned, num_warps=warps).asm["ptx"])


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: list[str], **options: int) -> Any:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in types
            if name.endswith("_ptr") or name in aligned
        },
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled


def wide_loads(ptx: str) -> int:
    return len(re.findall(r"ld\.global\S*\.v4\.b32", ptx))


LAUNCH = "griddepcontrol.launch_dependents"


def around_the_wait(ptx: str) -> tuple[str, str]:
    """A kernel waits once for the one before it, lets the next one start once, and stores nothing before it waited."""
    assert ptx.count("griddepcontrol.wait") == 1 and ptx.count(LAUNCH) == 1
    before, after = ptx.split("griddepcontrol.wait")
    assert "st.global" not in before and "atom" not in before
    return before, after


PRODUCTS = {
    "stacked": (3 * WIDTH + 24, WIDTH, "scales", True, "none"),
    "stacked, gated": (3 * WIDTH, WIDTH, "gates", True, "none"),
    "output": (WIDTH, WIDTH, "none", False, "add"),
    "up": (4 * WIDTH, WIDTH, "none", True, "relu2"),
    "down": (WIDTH, 4 * WIDTH, "none", False, "add"),
    "readout": (VOCAB, WIDTH, "none", False, "softcap"),
}


CASES = [*((name, 1, "plain") for name in PRODUCTS)]
CASES += [(name, 64, "plain") for name, (_, _, entry, _, _) in PRODUCTS.items() if entry != "gates"]
CASES += [("stacked", 8, "plain"), ("down", 8, "plain"), ("up", 1, "int8"), ("up", 64, "int8"), ("up", 64, "fp8")]


@pytest.mark.parametrize(("name", "batch", "weights"), CASES)
def test_products_compile_to_wide_loads(name: str, batch: int, weights: str) -> None:
    outputs, inputs, entry, norm, epilogue = PRODUCTS[name]
    tensors = ("x_ptr", "start_ptr", "weight_ptr", "base_ptr", "scaled_ptr", "out_ptr")
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("scales_ptr", "row_scale_ptr", "partial_ptr"), "*fp32")
    types |= {"arrivals_ptr": "*i32", "rows": "i32", "batch": "i32", "cap": "fp32", "eps": "fp32"}
    if entry == "gates":
        types["scales_ptr"] = "*bf16"
    if weights != "plain":
        types["weight_ptr"] = {"int8": "*i8", "fp8": "*fp8e4nv"}[weights]
    constants: dict[str, Any] = {"K": inputs, "ENTRY": entry, "NORM": norm, "EPILOGUE": epilogue, "EARLY": True}
    constants["CHANNELS"] = HEAD_DIM if entry == "gates" else 0
    constants["EIGHT_BITS"] = weights != "plain"
    if batch == 1:
        kernel, tile = fused_product.vector_kernel, fused_product.vector_tile(outputs, inputs, 2)
    else:
        kernel, tile = fused_product.batch_kernel, fused_product.batch_tile(batch, outputs, inputs)
        slice = inputs // tile.splits
        constants |= {"BATCH": tile.batch, "SPLITS": tile.splits, "SLICE": slice}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants |= {"ROWS": tile.rows, "CHUNK": tile.columns}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    ptx = assembly(kernel, types, constants, [] if outputs % 16 else ["rows"], tile.warps)
    # what does not depend on the kernel before this one is asked for before waiting for it
    before, after = around_the_wait(ptx)
    assert LAUNCH in before
    if batch > 1:
        assert ("wgmma" if tile.rows == 64 else "mma.sync") in after and "cp.async" in after
        assert "prefetch.global.L2" in before and "prefetch" not in after
        assert ("atom" in after) == (tile.splits > 1)
        return
    if weights != "plain":
        return
    assert wide_loads(before) == tile.rows * inputs // (32 * tile.warps * 8)
    assert wide_loads(after) == (1 if entry == "none" else 2) * inputs // tile.columns
    # all loads of a thread are independent; only where several warps share a row do they meet, once
    assert ptx.count("bar.sync") <= (0 if tile.warps == 1 else 4)


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_the_rings_loop_waits_for_nobody(batch: int, memory: bool) -> None:
    lanes, splits = fused_ring.lanes_and_splits(batch, WINDOW, HEADS, 1, HEAD_DIM)
    tensors = ("projected_ptr", "memory_ptr", "key_ptr", "value_ptr", "out_ptr")
    types = dict.fromkeys(tensors, "*bf16")
    types |= {"position_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "partial_ptr": "*fp32"}
    types |= {
        "arrivals_ptr": "*i32",
        "width": "i32",
        "memory_width": "i32",
        "window": "i32",
        "per_split": "i32",
        "scale": "fp32",
        "eps": "fp32",
    }
    constants = {"HEADS": HEADS, "KV_HEADS": HEADS, "GROUP": 1, "HALF": HEAD_DIM // 2, "BLOCK": HEAD_DIM // 2}
    constants |= {"GROUP_BLOCK": 1, "LANES": lanes, "SPLITS": splits, "MEMORY": memory, "EARLY": True}
    ptx = assembly(fused_ring.ring_kernel, types, constants, ["window", "per_split"], fused_ring.WARPS)
    before, after = around_the_wait(ptx)
    # the ring and the position, of the last step, but nothing that this step has made
    assert wide_loads(before) > 0 and LAUNCH in after
    loops = [
        ptx[ptx.index(label + ":") : jump.start()]
        for jump in re.finditer(r"bra\S*\s+(\$L__BB\w+)", ptx)
        if ptx.find((label := jump[1]) + ":") < jump.start()
    ]
    assert len(loops) == 1 and "bar.sync" not in loops[0]
    assert wide_loads(loops[0]) == 2 * lanes * HEAD_DIM // (32 * fused_ring.WARPS * 8)
    assert ("atom" in ptx) == (splits > 1)


OTHERS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "begin": (
        fused_decode.begin_kernel,
        {"token_ptr": "*i64", "embedding_ptr": "*bf16", "position_ptr": "*i64", "frequency_ptr": "*i64"}
        | {"out_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "vocabulary": "i32", "eps": "fp32"},
        {"TURN": fused_decode.TURN, "WIDTH": WIDTH, "HALF": 64, "WIDTH_BLOCK": 2048, "HALF_BLOCK": 64},
    ),
    "norm": (
        fused_decode.norm_kernel,
        dict.fromkeys(("x_ptr", "start_ptr", "scaled_ptr", "out_ptr"), "*bf16")
        | {"scales_ptr": "*fp32", "position_ptr": "*i64", "position_out_ptr": "*i64", "eps": "fp32"}
        | {"start_width": "i32"},
        {"WIDTH": WIDTH, "BLOCK": 2048, "ENTRY": "scales", "CHANNELS": 0, "LOGITS": 0, "COUNT": True},
    ),
    "finish": (
        fused_decode.finish_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "count": "i32", "cap": "fp32"},
        {"BLOCK": 1024, "EPILOGUE": "relu2"},
    ),
    "enter": (
        fused_read.enter_kernel,
        dict.fromkeys(("projected_ptr", "memory_ptr", "query_ptr", "key_ptr", "value_ptr"), "*bf16")
        | {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32"}
        | dict.fromkeys(("width", "memory_width", "count", "first", "step", "length"), "i32"),
        {"HEADS": HEADS, "KV_HEADS": HEADS, "GROUP": 1, "HALF": 64, "BLOCK": 64, "GROUP_BLOCK": 1, "MEMORY": True},
    ),
    "window": (
        fused_read.window_kernel,
        dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "out_ptr"), "*bf16")
        | {"empty_ptr": "*i64", "scale": "fp32"}
        | dict.fromkeys(("count", "first", "step", "length", "window"), "i32"),
        {"HEADS": HEADS, "KV_HEADS": HEADS, "GROUP": 1, "DIM": HEAD_DIM, "BLOCK": HEAD_DIM}
        | {"QUERIES": fused_read.NARROW[0], "KEYS": fused_read.NARROW[1]},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_kernel_waits_before_it_reads(name: str) -> None:
    """Only products let the next kernel start before they have waited: then two kernels on, the step before is over."""
    kernel, types, constants = OTHERS[name]
    ptx = assembly(kernel, types, constants | {"EARLY": True}, [], 8 if name == "window" else 4)
    before, after = around_the_wait(ptx)
    assert LAUNCH in after and "ld.global" not in before
    assert name != "window" or "wgmma" in after


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("kernel", [fused_inject.inject_kernel, fused_inject.inject_backward_kernel])
def test_injection_stays_in_registers(kernel: Any, memory: bool) -> None:
    """Wide loads of every feature, and nothing spilled to local memory."""
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    types = {name: "*fp32" if name in ("cos_ptr", "sin_ptr") else "*bf16" for name in pointers}
    types |= {"rows": "i32", "period": "i32", "eps": "fp32"}
    half = HEAD_DIM // 2
    constants = {"HEADS": HEADS, "KV_HEADS": HEADS, "HALF": half, "BLOCK": half, "ROWS": fused_inject.TILE // HEAD_DIM}
    width = 3 * HEADS * HEAD_DIM + (32 if memory else 0)
    constants |= {"WIDTH": width, "MEMORY": memory}
    ptx = assembly(kernel, types, constants, ["rows", "period"], fused_inject.WARPS)
    assert wide_loads(ptx) >= (8 if memory else 6) and "st.local" not in ptx


ATTENTION = {
    "forward": fused_attention.attend_kernel,
    "queries": fused_attention.queries_kernel,
    "keys": fused_attention.keys_kernel,
}


@pytest.mark.parametrize("step", [1, 32])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_stays_in_registers(name: str, step: int, tmp_path: Path) -> None:
    """Blocks come by the engine for tensors, products are the tensor cores' own, and no more than a word or two is
    spilled: assemblers differ by that."""
    kernel, tile = ATTENTION[name], fused_attention.TILES[name]
    constants = {"HEADS": HEADS, "GROUP": 1, "WIDTH": HEAD_DIM, "BLOCK": HEAD_DIM, "EXACT": "tf32"}
    constants |= {"QUERIES": tile.queries, "KEYS": tile.keys, "STEP": step}
    types = {"count": "i32", "start": "i32", "length": "i32", "window": "i32", "scale": "fp32"}
    for each in kernel.arg_names:
        if each.endswith("_ptr"):
            types[each] = "*fp32" if each in ("log_ptr", "delta_ptr") else "*bf16"
        elif each.endswith("_from"):
            rows = tile.keys if each in ("key_from", "value_from") else tile.queries
            types[each] = f"tensordesc<bf16[1, 1, {rows}, {HEAD_DIM}]>"
    compiled = built(
        kernel, types, constants, ["count", "length", "window"], num_warps=tile.warps, num_stages=tile.stages
    )
    ptx = str(compiled.asm["ptx"])
    assert "cp.async.bulk.tensor" in ptx and "wgmma.mma_async" in ptx and "mma.sync" not in ptx
    # two blocks of 4 warps, or one of 8, have a multiprocessor to themselves
    assert compiled.metadata.shared <= 227 * 1024 // (8 // tile.warps)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    told = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)], capture_output=True, text=True
    )
    spilled = re.search(r"REG:\d+ STACK:(\d+)", told.stdout)
    assert spilled is not None and int(spilled[1]) <= 16, told.stdout + told.stderr
