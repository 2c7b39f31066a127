"""Lines as libraries log them, in the text of their own versions, with what a test wants changed."""

# The guide's first row, as hipBLASLt of 2025 prints it, with the keys that a defect of its left empty.
_PROFILE = (
    "- {{function: matmul, M: {m}, N: {n}, K: {k}, lda: {lda}, ldb: {ldb}, ldc: {m}, ldd: {m}, stride_a: {stride_a}, "
    "stride_b: {stride_b}, stride_c: {stride_d}, stride_d: {stride_d}, alpha: {alpha}, beta: {beta}, "
    "transA: {trans_a}, transB: {trans_b}, batch_count: {batch}, scaleA: {scale}, scaleB: {scale}, : , : , "
    "scaleAlpha_vector: false, gradient: false, use_e: false, bias_vector: {bias}, bias_source: d, a_type: {a}, "
    "b_type: {a}, c_type: {d}, d_type: {d}, scale_type: f32_r, bias_type: {d}, compute_type: c_{compute}, "
    "activation_type: {activation}, flush: false, rotating: 512, cold_iters: 0, iters: 0{kernel}, "
    "call_count: {count}}}\n"
)
_BENCH = (
    "hipblaslt-bench --api_method c -m {m} -n {n} -k {k} --lda {lda} --ldb {ldb} --ldc {m} --ldd {m}  --stride_a "
    "{stride_a} --stride_b {stride_b} --stride_c {stride_d} --stride_d {stride_d}  --alpha {alpha} --beta {beta} "
    "--transA {trans_a} --transB {trans_b} --batch_count {batch} --scaleA {scale} --scaleB {scale}  --a_type {a} "
    "--b_type {a} --c_type {d} --d_type {d} --scale_type f32_r --bias_type f32_r   --compute_type {compute} "
    "--algo_method index --solution_index 56073 --activation_type {activation}\n"
)
_ROCBLAS = (
    '- {{ rocblas_function: "rocblas_gemm_ex", atomics_mode: atomics_allowed, a_type: "{a}", b_type: "{a}", c_type: '
    '"{d}", d_type: "{d}", compute_type: "{compute}", transA: \'{trans_a}\', transB: \'{trans_b}\', M: {m}, N: {n}, '
    "K: {k}, alpha: {alpha}, lda: {lda}, beta: {beta}, ldb: {ldb}, ldc: {m}, ldd: {m}, batch_count: {batch}, algo: 0, "
    "solution_index: 0, flags: none, call_count: {count} }}\n"
)
_ROCBLAS_BENCH = (
    "./rocblas-bench -f gemm_ex --transposeA {trans_a} --transposeB {trans_b} -m {m} -n {n} -k {k} --alpha {alpha} "
    "--a_type {a} --lda {lda} --b_type {a} --ldb {ldb} --beta {beta} --c_type {d} --ldc {m} --d_type {d} --ldd {m} "
    "--compute_type {compute} --algo 0 --solution_index 0 --flags 0\n"
)
_KERNEL = ", solution_index: 56073, solution_name: Cijk_Alik_Bljk_BBS_BH, kernel_name: Cijk_Alik_Bljk_BBS_BH_MT16x16"

# As hipBLASLt of 2026 logs a grouped product: the sizes of each, then what all have in common.
_GROUPS = {
    "profile": (
        " m: {m}, n: {n}, k: 64, lda: 64, ldb: 64, ldc: {m}, ldd: {m}, stride_a: 0, stride_b: 0, stride_c: 0, "
        "stride_d: 0",
        ",",
        "- {{function: matmul, grouped_gemm: {groups}, alpha: 1, beta: 0, transA: T, transB: N, batch_count: 1, "
        "scaleA: 0, scaleB: 0, scaleC: 0, scaleD: 0, swizzleA: false, swizzleB: false, scaleAlpha_vector: false, "
        "gradient: false, use_e: false, bias_vector: false, bias_source: d, a_type: bf16_r, b_type: bf16_r, "
        "c_type: bf16_r, d_type: bf16_r, scale_type: f32_r, bias_type: f32_r, aux_type: f32_r, compute_type: c_f32_r, "
        "algo_method: 2, solution_index: 5, activation_type: none, flush: false, call_count: 3}}\n",
    ),
    "bench": (
        " -m {m} -n {n} -k 64 --lda 64 --ldb 64 --ldc {m} --ldd {m} --stride_a 0 --stride_b 0 --stride_c 0 "
        "--stride_d 0",
        "",
        "hipblaslt-bench --api_method cpp --grouped_gemm {groups} --alpha 1 --beta 0 --transA T --transB N "
        "--batch_count 1 --scaleA 0 --scaleB 0   --a_type bf16_r --b_type bf16_r --c_type bf16_r --d_type bf16_r "
        "--scale_type f32_r --bias_type f32_r --compute_type f32_r --algo_method index --solution_index 5 "
        "--activation_type none  --any_stride\n",
    ),
}

FORMS = {"profile": _PROFILE, "bench": _BENCH, "rocblas": _ROCBLAS, "rocblas_bench": _ROCBLAS_BENCH}


def line(form: str = "profile", m: int = 16032, n: int = 109, k: int = 16384, **changes: object) -> str:
    """A line of one form that asks for D[m, n], bf16 TN and dense unless something else is said."""
    trans_a, trans_b = (str(changes.get(name, default)) for name, default in (("trans_a", "T"), ("trans_b", "N")))
    batch = int(str(changes.get("batch", 1)))
    values: dict[str, object] = {
        "m": m, "n": n, "k": k, "lda": m if trans_a == "N" else k, "ldb": k if trans_b == "N" else n, "alpha": "1.0",
        "beta": "0.0", "trans_a": trans_a, "trans_b": trans_b, "batch": batch, "scale": 0, "bias": "false",
        "a": "bf16_r", "d": "bf16_r", "compute": "f32_r", "activation": "none", "kernel": "", "count": 1,
        "stride_a": m * k if batch > 1 else 0, "stride_b": k * n if batch > 1 else 0,
        "stride_d": m * n if batch > 1 else 0,
    }  # fmt: skip
    return FORMS[form].format(**values | changes)


def grouped(form: str, *sizes: tuple[int, int]) -> str:
    """A line that asks for several products at once, each D[m, n] of a K of 64."""
    one, between, entire = _GROUPS[form]
    return entire.format(groups=between.join(one.format(m=m, n=n) for m, n in sizes))


def extended(**changes: object) -> str:
    """A line of hipBLASLt's extended profile, which names solution and kernel."""
    return line(kernel=_KERNEL, **changes)  # type: ignore[arg-type]


def trace(m: int = 16032, n: int = 109, k: int = 16384, **changes: str) -> str:
    """A line of cuBLASLt's trace, in the text of its versions 12 and 13."""
    values = {
        "compute": "transa=OP_T ",
        "type": "R_16BF",
        "d_type": "R_16BF",
        "a": f"rows={k} cols={m} ld={k}",
    } | changes
    a, d = f"[type={values['type']} {values['a']}]", f"[type={values['d_type']} rows={m} cols={n} ld={m}]"
    return (
        f"[2026-05-04 15:08:47][cublasLt][53055][Trace][cublasLtMatmul] A=0X32F600000 Adesc={a} B=0X32EE00000 "
        f"Bdesc=[type={values['type']} rows={k} cols={n} ld={k}] C=0X32EE10000 Cdesc={d} D=0X32EE10000 Ddesc={d} "
        f"computeDesc=[computeType=COMPUTE_32F scaleType=R_32F {values['compute']}smCountTarget=132] algo=[algoId=67 "
        "tile=MATMUL_TILE_64x32 stages=MATMUL_STAGES_64xAUTO customOption=29] workSpace=0X0 workSpaceSizeInBytes=0 "
        "beta=0 outOfPlace=0 stream=0X0\n"
    )


def hipblaslt_trace(m: int = 32, n: int = 16, k: int = 64, **changes: str) -> str:
    """A line of hipBLASLt's trace (HIPBLASLT_LOG_MASK=2), TN and fp16."""
    values = {"batch": "", "compute": "COMPUTE_32F", "epilogue": "EPILOGUE_DEFAULT biasPointer=0x0", "alpha": "alpha"}
    values |= changes
    layouts = {"A": (k, m), "B": (k, n), "C": (m, n), "D": (m, n)}
    reported = " ".join(
        f"{name}=0x7f{place}0 {name}desc=[type=R_16F rows={rows} cols={columns} ld={rows}"
        + (f" batch_count={values['batch']} batch_stride={rows * columns}]" if values["batch"] else "]")
        for place, (name, (rows, columns)) in enumerate(layouts.items(), start=1)
    )
    return (
        f"[2026-05-04 15:08:47][HIPBLASLT][71][Trace][rocblaslt_matmul] {reported} computeDesc=[computeType="
        f"{values['compute']} scaleType=R_32F transA=OP_T transB=OP_N epilogue={values['epilogue']}] workSpace=0x7f "
        f"workSpaceSizeInBytes=33554432 {values['alpha']}=1 beta=0 stream=0x0\n"
    )
