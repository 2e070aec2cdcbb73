# SPDX-License-Identifier: Apache-2.0
"""tools/check_isa_leaks.py: at which level each kind of instruction first appears, as objdump shows it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

import check_isa_leaks  # noqa: E402

NONE = check_isa_leaks.NO_LEVEL

X86 = {
    # SSE2 and what every x86-64 has; older processors run tzcnt as bsf.
    "baseline": """
        addps %xmm0,%xmm1; andnps %xmm0,%xmm1; pminub %xmm0,%xmm1; pmaxsw %xmm0,%xmm1; pcmpeqd %xmm0,%xmm1
        pinsrw $1,%eax,%xmm0; pextrw $1,%xmm0,%eax; pmuludq %xmm0,%xmm1; movntdq %xmm0,(%rax); movntps %xmm0,(%rax)
        packssdw %xmm0,%xmm1; shufps $1,%xmm0,%xmm1; movsd %xmm0,%xmm1; movslq %eax,%rcx; movhlps %xmm0,%xmm1
        pshufd $1,%xmm0,%xmm1; cvttps2dq %xmm0,%xmm1; rep bsf %eax,%ecx; imul %eax,%ecx; prefetcht0 (%rax); mfence
        shl %cl,%eax; popf; movaps %xmm14,%xmm15; add %fs:8,%rax
    """,
    # SSE3, SSSE3, SSE4.1, SSE4.2; AVX, AVX2, FMA, F16C, BMI2.
    "x86_v3": """
        addsubps %xmm0,%xmm1; addsubpd %xmm0,%xmm1; haddps %xmm0,%xmm1; hsubpd %xmm0,%xmm1; movddup %xmm0,%xmm1
        movshdup %xmm0,%xmm1; movsldup %xmm0,%xmm1; lddqu (%rax),%xmm0; fisttpl (%rax); monitor; mwait
        pabsb %xmm0,%xmm1; palignr $1,%xmm0,%xmm1; phaddw %xmm0,%xmm1; phsubsw %xmm0,%xmm1; pmaddubsw %xmm0,%xmm1
        pmulhrsw %xmm0,%xmm1; pshufb %xmm0,%xmm1; psignd %xmm0,%xmm1; blendps $1,%xmm0,%xmm1; blendvpd %xmm0,%xmm1
        pblendw $1,%xmm0,%xmm1; pblendvb %xmm0,%xmm1; dpps $1,%xmm0,%xmm1; extractps $1,%xmm0,%eax
        insertps $1,%xmm0,%xmm1; movntdqa (%rax),%xmm0; mpsadbw $1,%xmm0,%xmm1; packusdw %xmm0,%xmm1
        pcmpeqq %xmm0,%xmm1; pcmpgtq %xmm0,%xmm1; pextrb $1,%xmm0,%eax; pextrw $1,%xmm0,(%rax); pextrq $1,%xmm0,%rax
        phminposuw %xmm0,%xmm1
        pinsrd $1,%eax,%xmm0; pmaxsb %xmm0,%xmm1; pmaxuw %xmm0,%xmm1; pminsd %xmm0,%xmm1; pminud %xmm0,%xmm1
        pmovsxbw %xmm0,%xmm1; pmovzxdq %xmm0,%xmm1; pmuldq %xmm0,%xmm1; pmulld %xmm0,%xmm1; ptest %xmm0,%xmm1
        roundps $1,%xmm0,%xmm1; roundsd $1,%xmm0,%xmm1; crc32b %al,%ecx; crc32q %rax,%rcx; pcmpestri $1,%xmm0,%xmm1
        pcmpistrm $1,%xmm0,%xmm1; popcnt %eax,%ecx; vaddps %xmm0,%xmm1,%xmm2; vaddps %ymm0,%ymm1,%ymm2; vzeroupper
        vfmadd231ps %ymm0,%ymm1,%ymm2; vcvtph2ps %xmm0,%ymm1; vcvtps2ph $1,%ymm0,%xmm1
        vpgatherdd %ymm0,(%rax,%ymm1),%ymm2
        vpermd %ymm0,%ymm1,%ymm2; mulx %eax,%ecx,%edx; pdep %eax,%ecx,%edx; rorx $1,%eax,%ecx; shlx %eax,%ecx,%edx
        bzhi %eax,%ecx,%edx
    """,
    # AVX-512 F, BW, DQ, VL and CD: with registers of every width and number.
    "x86_v4": """
        vaddps %zmm0,%zmm1,%zmm2; vaddps %ymm16,%ymm1,%ymm2; vaddps %ymm0,%ymm1,%ymm2{%k1}; kmovw %k1,%eax
        vpternlogd $255,%ymm0,%ymm1,%ymm2; vpternlogq $1,%xmm0,%xmm1,%xmm2; vpermt2ps %ymm0,%ymm1,%ymm2
        vrndscaleps $1,%ymm0,%ymm1; vscalefps %ymm0,%ymm1,%ymm2; vgetexpps %xmm0,%xmm1; vpmovdw %ymm0,%xmm1
        vpmullq %ymm0,%ymm1,%ymm2; vpsraq $1,%ymm0,%ymm1; vpmaxsq %ymm0,%ymm1,%ymm2; vcvtudq2ps %xmm0,%xmm1
        vpabsq %ymm0,%ymm1; vpermw %ymm0,%ymm1,%ymm2; vplzcntd %ymm0,%ymm1; vpconflictd %zmm0,%zmm1
        vaddps 4(%rax){1to8},%ymm1,%ymm2; vmovdqu64 %fs:8,%ymm1; vcvtps2ph $1,%zmm0,%ymm1; vcvtph2ps %ymm0,%zmm1
        vpermd %zmm0,%zmm1,%zmm2; vpshufb %zmm0,%zmm1,%zmm2
    """,
    "x86_v4_bf16": """
        vdpbf16ps %zmm0,%zmm1,%zmm2; vdpbf16ps %ymm0,%ymm1,%ymm2; vcvtneps2bf16 %zmm0,%ymm1
        vcvtne2ps2bf16 %xmm0,%xmm1,%xmm2; vpdpbusd %zmm0,%zmm1,%zmm2; {evex} vpdpwssd %xmm0,%xmm1,%xmm2
    """,
    "x86_amx": """
        tdpbf16ps %tmm0,%tmm1,%tmm2; tileloadd (%rax,%rcx),%tmm0; tilestored %tmm0,(%rax,%rcx); tilezero %tmm0
        ldtilecfg (%rax); sttilecfg (%rax); tilerelease
    """,
    NONE: """
        andn %eax,%ecx,%edx; bextr %eax,%ecx,%edx; blsi %eax,%ecx; blsmsk %eax,%ecx; blsr %rax,%rcx; lzcnt %eax,%ecx
        movbe (%rax),%ecx; adcx %eax,%ecx; adox %eax,%ecx; rdrand %eax; rdseed %eax; aesenc %xmm0,%xmm1
        vaesdec %ymm0,%ymm1,%ymm2; pclmulqdq $1,%xmm0,%xmm1; vpclmulqdq $1,%zmm0,%zmm1,%zmm2; sha1msg1 %xmm0,%xmm1
        sha256rnds2 %xmm0,%xmm1; gf2p8mulb %xmm0,%xmm1; vgf2p8mulb %zmm0,%zmm1,%zmm2; vpermb %zmm0,%zmm1,%zmm2
        vpermi2b %ymm0,%ymm1,%ymm2; vpermt2b %zmm0,%zmm1,%zmm2; vpmultishiftqb %zmm0,%zmm1,%zmm2
        vpcompressb %zmm0,%zmm1; vpexpandw %zmm0,%zmm1; vpshldvd %zmm0,%zmm1,%zmm2; vpshrdw $1,%zmm0,%zmm1,%zmm2
        vpmadd52luq %zmm0,%zmm1,%zmm2; vpopcntd %zmm0,%zmm1; vpopcntb %ymm0,%ymm1; vpshufbitqmb %zmm0,%zmm1,%k1
        vp2intersectd %zmm0,%zmm1,%k2; vaddph %zmm0,%zmm1,%zmm2; vfmadd213sh %xmm0,%xmm1,%xmm2; vcvtph2dq %ymm0,%zmm1
        vcvtdq2ph %zmm0,%ymm1; vcvtsh2si %xmm0,%eax; vmovw %eax,%xmm0; {vex} vpdpbusd %ymm0,%ymm1,%ymm2
        {vex} vpmadd52luq %ymm0,%ymm1,%ymm2; tdpbssd %tmm0,%tmm1,%tmm2; tdpfp16ps %tmm0,%tmm1,%tmm2
    """,
}

ARM = {
    "baseline": """
        fadd v0.4s,v1.4s,v2.4s; fmla v0.4s,v1.4s,v2.s[0]; fcvtn v0.4h,v1.4s; fcvt h0,s1; fmov s0,#1.0; ldxr x0,[x1]
        stlr x0,[x1]; ldp x0,x1,[x2]; ldar x0,[x1]; ldr x0,[x1]; paciasp; st1 {v0.4s},[x0]; stp q0,q1,[x0]
        smull v0.4s,v1.4h,v2.4h; uaddlv h0,v1.8b; cnt v0.8b,v1.8b; ld1 {v0.8h},[x0]; csel x0,x1,x2,eq; cset x0,eq
    """,
    "arm_bf16": """
        bfdot v0.4s,v1.8h,v2.8h; bfmmla v0.4s,v1.8h,v2.8h; bfmlalb v0.4s,v1.8h,v2.8h; bfcvtn v0.4h,v1.4s
        sdot v0.4s,v1.16b,v2.16b; udot v0.4s,v1.16b,v2.16b; fadd v0.8h,v1.8h,v2.8h; fmul h0,h1,h2
        ldadd x0,x1,[x2]; ldaddal w0,w1,[x2]; stadd x0,[x1]; swp x0,x1,[x2]; casal x0,x1,[x2]; ldumaxb w0,w1,[x2]
        sqrdmlah v0.4s,v1.4s,v2.4s
    """,
    NONE: """
        fadd z0.s,z1.s,z2.s; ld1w {z0.s},p0/z,[x0]; ptrue p0.s; cntw x0; rdvl x0,#1; whilelt p0.s,x0,x1
        smmla v0.4s,v1.16b,v2.16b; usdot v0.4s,v1.16b,v2.16b; fmlal v0.4s,v1.4h,v2.4h
        fcmla v0.4s,v1.4s,v2.4s,#90; fcadd v0.4s,v1.4s,v2.4s,#90; fjcvtzs w0,d0; aese v0.16b,v1.16b
        sha256h q0,q1,v2.4s; pmull v0.1q,v1.1d,v2.1d
    """,
}
EXTENSIONS = ".arch armv8.6-a+sve+crypto+fp16+fp16fml+bf16+i8mm+dotprod\n"


@pytest.mark.parametrize("level", X86)
def test_instructions_of_x86(tmp_path: Path, level):
    if platform.machine() != "x86_64":
        pytest.skip("an assembler for x86-64")
    compiler = os.environ.get("CXX", "c++").split()
    found = levels_of(tmp_path, compiler, X86[level])
    assert found == dict.fromkeys(found, level)


@pytest.mark.parametrize("level", ARM)
def test_instructions_of_arm(tmp_path: Path, level):
    compiler = "c++" if platform.machine() == "aarch64" else "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip("no assembler for 64-bit Arm")
    found = levels_of(tmp_path, [compiler], EXTENSIONS + ARM[level])
    assert found == dict.fromkeys(found, level)


def levels_of(folder: Path, compiler: list[str], source: str) -> dict[str, str]:
    """Assemble a text, and return the level that the tool gives each instruction."""
    (folder / "text.s").write_text("\n".join(part.strip() for part in source.replace(";", "\n").splitlines()) + "\n")
    subprocess.run([*compiler, "-c", "text.s", "-o", "text.o"], cwd=folder, check=True)
    path = folder / "text.o"
    return {text: check_isa_leaks.first_level(text, path) for _, text in check_isa_leaks.instructions(path)}
