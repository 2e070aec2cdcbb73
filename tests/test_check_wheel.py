# SPDX-License-Identifier: Apache-2.0
"""The gates on finished files: real wheels and an sdist pass, and each fault planted in one is seen by its gate."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

for needed in ("auditwheel", "abi3audit", "twine", "elftools", "scikit_build_core"):
    pytest.importorskip(needed, reason="the pinned tools are not installed")
import check_isa_leaks  # noqa: E402
import check_wheel  # noqa: E402
from gates.programs import program_problems  # noqa: E402
from gates.sdist import sdist_problems  # noqa: E402
from gates.wheel import wheel_problems  # noqa: E402

BIN = Path(sys.executable).parent
WITH_TOOLS = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
MODULE = "gdn_cpu/_C.abi3.so"
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")

INFO = f"gdn_cpu-{(ROOT / 'VERSION').read_text().strip()}.dist-info"

Contents = dict[str, bytes]


def read(path: Path) -> Contents:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}


def write(path: Path, contents: Mapping[str, bytes]) -> Path:
    """Write a wheel of these contents, with a RECORD of them where there is to be one."""
    records = [file for file in contents if file.endswith("/RECORD")]
    rows = [f"{file},sha256={digest(data)},{len(data)}\n" for file, data in contents.items() if file not in records]
    return write_as_is(path, {**contents, **{file: "".join([*rows, f"{file},,\n"]).encode() for file in records}})


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_as_is(path: Path, contents: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def cpu_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed gdn-cpu as a wheel again, with the tag that it reaches."""
    try:
        installed = importlib.metadata.distribution("gdn-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gdn-cpu is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    made_by_pip = ("INSTALLER", "REQUESTED", "direct_url.json")
    files = [file for file in installed.files if file.name not in made_by_pip and file.suffix != ".pyc"]
    contents = {str(file): Path(file.locate()).read_bytes() for file in files}
    name = f"gdn_cpu-{installed.version}-cp310-abi3-linux_{platform.machine()}.whl"
    plain = write(folder / name, contents)
    repair = ["auditwheel", "repair", "--patcher", "none", "--wheel-dir", folder / "repaired", plain]
    subprocess.run(repair, env=WITH_TOOLS, check=True, capture_output=True)
    return next((folder / "repaired").iterdir())


@pytest.fixture(scope="module")
def small_wheel(cpu_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a module that does nothing: reading every instruction of the real one takes seconds."""
    folder = tmp_path_factory.mktemp("small")
    contents = read(cpu_wheel) | {MODULE: compiled(folder, ENTRY, "-fvisibility=hidden")}
    wheel = write(folder / cpu_wheel.name, contents)
    assert found(wheel) == ""
    return wheel


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    options = ["-qq", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT / "packages/gdn-core"], check=True)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def cpu_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT / "packages/gdn-cpu",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.iterdir())


def compiled(folder: Path, source: str, *options: str) -> bytes:
    """Compile a module in place of the real one."""
    (folder / "planted.cpp").write_text(source)
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-O2", "-fPIC", "-shared", "planted.cpp", "-o", "planted.so", *options]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "planted.so").read_bytes()


def found(path: Path, gate: Callable[..., object] = wheel_problems, **options: bool) -> str:
    if gate is wheel_problems:
        options.setdefault("is_release", False)
    return "\n".join(gate(path, **options))


def test_wheels_and_an_sdist_without_faults_pass_every_gate(cpu_wheel: Path, core_wheel: Path, cpu_sdist: Path):
    for wheel in (cpu_wheel, core_wheel):
        assert found(wheel) == ""
        assert found(wheel, program_problems) == ""
    assert found(cpu_sdist, sdist_problems) == ""
    assert found(cpu_sdist, program_problems) == ""


ENTRY = 'extern "C" __attribute__((visibility("default"))) void* PyInit__C() { return nullptr; }\n'
LOOP = "void clear(int* x) {\n#pragma omp parallel for\nfor (int i = 0; i < 8; ++i) x[i] = 0; }"
# GCC's vectors, so that no intrinsic's header is needed.
ADD = "typedef float V __attribute__((vector_size(64)));\nvoid add(V* x, const V* y) { *x += *y; }"


def called(name: str) -> str:
    return f'extern "C" int {name}();\nint f() {{ return {name}(); }}'


# Relocations enough that packing them saves something.
PACKED = f"static int x;\nint* table[64] = {{{'&x, ' * 64}}};\n{called('rand')}"


@pytest.mark.report("E01", "E07", "D08")
@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        (LOOP, ["-fopenmp"], "needs libgomp.so.1. Do not link it"),
        ("void other();\nvoid f() { other(); }", ["-Wl,-rpath,/opt/lib"], "search path of its own (RPATH)"),
        ('__attribute__((visibility("default"))) int extra = 1;', [], "exports extra"),
        (
            'extern "C" int omp_get_num_threads();\nint f() { return omp_get_num_threads(); }',
            [],
            "expects omp_get_num_t",
        ),
        ("", ["-s"], "is stripped"),
        # The same faults in other words.
        ("", ["-Wl,--no-as-needed", "-l:libgomp.so.1"], "needs libgomp.so.1. Do not link it"),
        ("", ["-Wl,-f,libgomp.so.1"], "brings in another library (DT_AUXILIARY)"),
        ("", ["-Wl,--enable-new-dtags,-rpath,$ORIGIN/../torch/lib"], "search path of its own (RPATH)"),
        (called("aoti_torch_delete_tensor_object"), [], "expects aoti_torch_delete_tensor_object from"),
        (called("_ZN5torch8autograd7executeEv"), [], "expects _ZN5torch8autograd7executeEv from"),
        (
            'extern "C" int _ZTVN3c1010TensorImplE;\nint* f() { return &_ZTVN3c1010TensorImplE; }',
            [],
            "expects _ZTVN3c10",
        ),
        (called("__cudaRegisterFatBinary"), [], "expects __cudaRegisterFatBinary from"),
        (called("nvrtcVersion"), [], "expects nvrtcVersion from"),
        (called("cblas_sgemm"), [], "expects cblas_sgemm from"),
        ("", ["-Wl,-z,execstack"], "stack that can be executed"),
        (
            'asm(".data\\n.text\\n.globl at\\n.hidden at\\nat: .quad PyInit__C\\n");',
            ["-Wl,-z,notext"],
            "code that is changed",
        ),
        pytest.param(
            PACKED,
            ["-Wl,-z,pack-relative-relocs"],
            "asks for GLIBC_ABI_DT_RELR (no symbol), which manylinux",
            marks=ON_X86,  # binutils packs for Arm since 2.43
        ),
    ],
    ids=[
        *("libgomp", "rpath", "export", "foreign", "stripped", "libgomp by its file", "auxiliary", "runpath"),
        *("torch's C", "torch's C++", "torch's tables", "CUDA", "NVRTC", "BLAS", "stack", "relocated code", "packed"),
    ],
)
def test_a_module_that_links_what_it_must_not(small_wheel: Path, tmp_path: Path, source, options, problem):
    contents = read(small_wheel)
    contents[MODULE] = compiled(tmp_path, ENTRY + source, "-fvisibility=hidden", *options)
    assert problem in found(write(tmp_path / small_wheel.name, contents))


def test_a_module_that_python_cannot_find(small_wheel: Path, tmp_path: Path):
    contents = read(small_wheel)
    contents[MODULE] = compiled(tmp_path, "int nothing() { return 0; }", "-fvisibility=hidden")
    assert "does not export PyInit__C" in found(write(tmp_path / small_wheel.name, contents))


@ON_X86
@pytest.mark.parametrize(
    ("namespace", "problem"),
    [
        ("gdn::cpu::baseline", "is of the level baseline and needs x86_v4"),
        ("gdn::cpu::x86_v3", "is of the level x86_v3 and needs x86_v4"),
        # A function that no level owns, of which the linker kept an AVX-512 copy.
        ("std_like", "is of the level baseline and needs x86_v4"),
        ("gdn::cpu::x86_v4", None),
    ],
)
def test_AVX_512_below_its_level_in_a_wheel(small_wheel: Path, tmp_path: Path, namespace, problem):
    contents = read(small_wheel)
    source = f"{ENTRY}namespace {namespace} {{ {ADD.replace(chr(10), ' ')} }}"
    contents[MODULE] = compiled(tmp_path, source, "-fvisibility=hidden", "-mavx512f", "-nostartfiles")
    seen = found(write(tmp_path / small_wheel.name, contents))
    assert seen == "" if problem is None else problem in seen


@ON_X86
def test_AVX_512_in_an_object_of_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "CMakeFiles" / "gdn_cpu_kernels_baseline.dir"
    folder.mkdir(parents=True)
    compiled(tmp_path, f"namespace gdn::cpu::baseline {{ {ADD.replace(chr(10), ' ')} }}", "-mavx512f", "-c")
    (tmp_path / "planted.so").rename(folder / "planted.o")
    assert check_isa_leaks.check_objects(tmp_path) == 1
    assert "needs x86_v4" in capsys.readouterr().err


def without(name: str) -> Callable[[Contents], Contents]:
    return lambda contents: {path: data for path, data in contents.items() if not path.endswith(name)}


def replaced(file: str, old: str, new: str) -> Callable[[Contents], Contents]:
    def change(contents: Contents) -> Contents:
        (path,) = (path for path in contents if path.endswith(file))
        assert old.encode() in contents[path]
        return contents | {path: contents[path].replace(old.encode(), new.encode())}

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("/licenses/LICENSE"), "licence: expected the repository's LICENSE"),
        (replaced("/licenses/LICENSE", "Apache", "Another"), "licence: expected the repository's LICENSE"),
        (lambda contents: contents | {"gdn_cpu/table.bin": os.urandom(9 << 20)}, "size: expected at most 8 MiB"),
        (lambda contents: contents | {"tests/test_it.py": b""}, "installs outside of gdn_cpu: tests"),
        (lambda contents: contents | {"gdn_cpu.libs/libgomp.so.1": b""}, "installs outside of gdn_cpu: gdn_cpu.libs"),
        (without("/py.typed"), "no gdn_cpu/py.typed"),
        (without("/_C.pyi"), "lacks gdn_cpu/_C.pyi"),
        (lambda contents: contents | {"gdn_cpu/helper": contents[MODULE]}, "holds gdn_cpu/helper, which is no source"),
        (lambda contents: contents | {"gdn_cpu/__pycache__/a.cpython-310.pyc": b""}, "holds gdn_cpu/__pycache__/a.cpy"),
        (lambda contents: contents | {"gdn_cpu/csrc/a.cpp": b""}, "holds gdn_cpu/csrc/a.cpp, which is no source"),
        (lambda contents: contents | {f"{INFO}/licenses/COPYING": b"GPL"}, f"holds {INFO}/licenses/COPYING"),
        (without(".so"), "shared objects: expected ['gdn_cpu/_C.abi3.so'], got []"),
        (without("/entry_points.txt"), "entry points: expected"),
        (replaced("/METADATA", "nanobind-backend>=1.0", "nanobind-backend==1.0"), "unexpected requirement nanobind-b"),
        (
            replaced("/METADATA", "Requires-Python: >=3.10", "Requires-Python: >=3.11"),
            "expected Requires-Python: >=3.10",
        ),
        (replaced("/WHEEL", "cp310-abi3", "cp311-cp311"), "in the file WHEEL"),
        (replaced("/WHEEL", "Purelib: false", "Purelib: true"), "Root-Is-Purelib is true"),
        (without("/METADATA"), "no METADATA in the wheel"),
        (without("/WHEEL"), "no WHEEL in the wheel"),
        (without("/RECORD"), "no RECORD in the wheel"),
        (
            replaced("/METADATA", "License-File: LICENSE", "License-File: LICENSE\nLicense-File: COPYING"),
            "got LICENSE, C",
        ),
        (replaced("/METADATA", "Provides-Extra: openblas\n", ""), "expected the extras ['openblas'], got []"),
        (lambda contents: contents | {MODULE: b"not an ELF file"}, "is not a shared object"),
    ],
)
def test_a_wheel_with_wrong_contents(small_wheel: Path, tmp_path: Path, change, problem):
    assert problem in found(write(tmp_path / small_wheel.name, change(read(small_wheel))))


def test_a_wheel_without_one_of_its_modules(core_wheel: Path, tmp_path: Path):
    path = write(tmp_path / core_wheel.name, without("gdn_core/cli/__init__.py")(read(core_wheel)))
    assert found(path) == "lacks gdn_core/cli/__init__.py. Mend wheel.packages in pyproject.toml"


def test_an_extra_that_is_not_declared(core_wheel: Path, tmp_path: Path):
    path = write(tmp_path / core_wheel.name, replaced("/METADATA", "Provides-Extra: cuda\n", "")(read(core_wheel)))
    assert "expected the extras ['cpu', 'cuda', 'transformers', 'triton']" in found(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replaced("gdn_core/_registry.py", "import", "import "), "gdn_core/_registry.py is not the file that was rec"),
        (lambda contents: contents | {"gdn_core/more.py": b""}, "gdn_core/more.py is not listed"),
        (without("gdn_core/_registry.py"), "gdn_core/_registry.py is listed and not there"),
    ],
    ids=["changed", "added", "removed"],
)
def test_a_record_of_other_files(core_wheel: Path, tmp_path: Path, change, problem):
    path = write_as_is(tmp_path / core_wheel.name, change(read(core_wheel)))
    assert f"RECORD: {problem}" in found(path)


def test_a_file_that_is_in_a_wheel_twice(core_wheel: Path, tmp_path: Path):
    path = write_as_is(tmp_path / core_wheel.name, read(core_wheel))
    with zipfile.ZipFile(path, "a") as wheel, pytest.warns(UserWarning, match="Duplicate name"):
        wheel.writestr("gdn_core/_registry.py", b"")
    assert "no single copy of each file" in found(path)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("pin", ["gdn-{}==0.0.1;", "gdn-{}>={version};", "gdn-{}~={version};"])
def test_extras_that_do_not_pin_the_same_version(core_wheel: Path, tmp_path: Path, backend, pin):
    version = core_wheel.name.split("-")[1]
    wrong = pin.format(backend, version=version)
    change = replaced("/METADATA", f"gdn-{backend}=={version};", wrong)
    seen = found(write(tmp_path / core_wheel.name, change(read(core_wheel))))
    assert f"lacks the requirement gdn-{backend}=={version}" in seen
    assert f"unexpected requirement {wrong.rstrip(';')}" in seen


@pytest.mark.report("E06")
def test_a_tag_that_promises_too_much(cpu_wheel: Path, tmp_path: Path):
    """Its symbols are newer than what glibc 2.5, or 2.17 on Arm, has."""
    oldest = {"x86_64": "manylinux_2_5", "aarch64": "manylinux_2_17"}[platform.machine()]
    name = cpu_wheel.name.replace(cpu_wheel.stem.split("-")[-1], f"{oldest}_{platform.machine()}")
    path = write(tmp_path / name, read(cpu_wheel))
    assert f"which {oldest}_{platform.machine()} does not have" in found(path)
    assert f"the tag says {oldest}_{platform.machine()}" in found(path, program_problems)


def test_tags_that_a_release_must_not_have(small_wheel: Path, tmp_path: Path):
    contents = read(small_wheel)
    platform_tag = small_wheel.stem.split("-")[-1]
    plain = write(tmp_path / small_wheel.name.replace(platform_tag, f"linux_{platform.machine()}"), contents)
    assert "For a plain linux tag: auditwheel repair" in found(plain)
    newer = write(tmp_path / small_wheel.name.replace(platform_tag, f"manylinux_2_39_{platform.machine()}"), contents)
    assert "a release is for manylinux_2_28" in found(newer, is_release=True)
    assert "a release is for" not in found(newer)


def test_a_module_for_another_processor(small_wheel: Path, tmp_path: Path):
    name = small_wheel.name.replace("x86_64", "other").replace("aarch64", "x86_64").replace("other", "aarch64")
    assert "and the tag says" in found(write(tmp_path / name, read(small_wheel)))


@pytest.mark.report("E01")
def test_a_symbol_outside_of_the_stable_ABI(small_wheel: Path, tmp_path: Path):
    contents = read(small_wheel)
    source = 'extern "C" void* PyUnicode_New(long, unsigned);\nvoid* f() { return PyUnicode_New(1, 127); }'
    contents[MODULE] = compiled(tmp_path, ENTRY + source, "-fvisibility=hidden")
    assert "abi3audit failed" in found(write(tmp_path / small_wheel.name, contents), program_problems)


def test_a_description_that_no_index_renders(core_wheel: Path, tmp_path: Path):
    contents = replaced("/METADATA", "text/markdown", "text/x-rst")(read(core_wheel))
    (metadata,) = (path for path in contents if path.endswith("/METADATA"))
    contents[metadata] += b"\n.. no-such-directive::\n"
    assert "twine failed" in found(write(tmp_path / core_wheel.name, contents), program_problems)


@pytest.mark.parametrize("kept", [0, 1000, -2000])
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_file_that_is_cut_off(core_wheel: Path, cpu_sdist: Path, tmp_path: Path, kind, kept):
    whole = core_wheel if kind == "wheel" else cpu_sdist
    (tmp_path / whole.name).write_bytes(whole.read_bytes()[:kept])
    assert "cannot be read (" in found(tmp_path / whole.name, check_wheel.problems)


@pytest.mark.parametrize(
    ("left_out", "problem"),
    [
        ("/cmake/GdnIsa.cmake", "lacks cmake/GdnIsa.cmake"),
        ("/cmake/exports.map", "lacks cmake/exports.map"),
        ("/cmake/abi/tensor_view.h", "lacks tensor_view.h, which"),
        ("/csrc/kernels/simd/transpose.h", "lacks ../simd/transpose.h, which"),
        ("/LICENSE", "licence: expected the repository's LICENSE"),
        ("/VERSION", "lacks VERSION"),
        ("/csrc/binding/records.cpp", "lacks csrc/binding/records.cpp"),
        ("/src/gdn_cpu/_C.pyi", "lacks src/gdn_cpu/_C.pyi"),
        ("/tests/test_installed.py", "lacks tests/test_installed.py"),
        ("/PKG-INFO", "expected Version: "),
    ],
)
def test_an_sdist_that_lacks_something(cpu_sdist: Path, tmp_path: Path, left_out, problem):
    path = changed_sdist(cpu_sdist, tmp_path, lambda member: None if member.name.endswith(left_out) else member)
    assert problem in found(path, sdist_problems)


def test_an_sdist_with_links_and_build_products(cpu_sdist: Path, tmp_path: Path):
    def change(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if member.name.endswith("/LICENSE"):
            member.type, member.linkname, member.size = tarfile.SYMTYPE, "../../LICENSE", 0
        if member.name.endswith("/README.md"):
            member.name = member.name.replace("README.md", "build/kernel.so")
        return member

    seen = found(changed_sdist(cpu_sdist, tmp_path, change), sdist_problems)
    assert "LICENSE is a link" in seen
    assert "holds build/kernel.so, which is no source" in seen


@pytest.mark.parametrize(
    "junk", [".venv/bin/activate", "dist/other.whl", "CMakeCache.txt", "src/gdn_cpu/a.o", ".git/HEAD"]
)
def test_an_sdist_with_what_lay_about(cpu_sdist: Path, tmp_path: Path, junk):
    root = cpu_sdist.name.removesuffix(".tar.gz")
    path = changed_sdist(cpu_sdist, tmp_path, lambda member: member, {f"{root}/{junk}": b""})
    assert found(path, sdist_problems) == (
        f"holds {junk}, which is no source of the package. Build in a folder that .gitignore names"
    )


def test_an_sdist_that_unpacks_beside_itself(cpu_sdist: Path, tmp_path: Path):
    path = changed_sdist(cpu_sdist, tmp_path, lambda member: member, {"elsewhere/setup.py": b""})
    assert "elsewhere/setup.py lies outside of gdn_cpu-" in found(path, sdist_problems)


def test_an_sdist_of_another_version_than_it_says(cpu_sdist: Path, tmp_path: Path):
    root = cpu_sdist.name.removesuffix(".tar.gz")
    version = f"{root}/VERSION"
    path = changed_sdist(
        cpu_sdist, tmp_path, lambda member: None if member.name == version else member, {version: b"9.9.9\n"}
    )
    assert "VERSION: expected " in found(path, sdist_problems)


def changed_sdist(
    sdist: Path,
    folder: Path,
    change: Callable[[tarfile.TarInfo], tarfile.TarInfo | None],
    added: Mapping[str, bytes] = {},
) -> Path:
    with tarfile.open(sdist) as old, tarfile.open(folder / sdist.name, "w:gz") as new:
        for member in old.getmembers():
            content = old.extractfile(member)
            kept = change(member)
            if kept is not None:
                new.addfile(kept, io.BytesIO(content.read()) if content else None)
        for name, data in added.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return folder / sdist.name
