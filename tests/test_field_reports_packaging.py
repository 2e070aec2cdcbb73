# SPDX-License-Identifier: Apache-2.0
"""Faults of installing and importing that others had: what the packages need, and what they say where it is missing."""

import ast
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import gdn_core
from contract_calls import small_call

ROOT = Path(gdn_core.__file__).parent


@pytest.fixture(params=["gdn_cpu", "gdn_cuda"])
def native_module(request):
    """The path of the extension of each native package, found without loading it."""
    if request.param == "gdn_cpu":
        request.getfixturevalue("cpu_backend")
    elif importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return Path(importlib.util.find_spec(f"{request.param}._C").origin)


def run_python(code, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GDN_")} | env
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.report("E01")
def test_the_extension_uses_no_symbol_of_torch(native_module):
    """What it does not use cannot break with another torch."""
    binary = native_module.read_bytes()
    for name in (b"_ZN3c10", b"_ZNK3c10", b"_ZN2at", b"_ZN5torch", b"aoti_torch"):
        assert name not in binary
    assert ".abi3." in native_module.name or os.name == "nt", "one build for every Python"


@pytest.mark.report("E01")
def test_any_torch_from_the_floor_on_is_accepted():
    packaging = pytest.importorskip("packaging.requirements")
    wanted = next(
        requirement
        for text in importlib.metadata.requires("gdn-core")
        if (requirement := packaging.Requirement(text)).name == "torch"
    )
    assert {(s.operator, s.version) for s in wanted.specifier} == {(">=", "2.6")}


@pytest.mark.report("E03")
def test_gdn_core_is_pure_python_for_any_python():
    assert not [path for path in ROOT.rglob("*") if path.suffix in (".so", ".pyd", ".dylib", ".c", ".cpp")]
    wheel = importlib.metadata.distribution("gdn-core").read_text("WHEEL")
    assert "Tag: py3-none-any" in wheel
    required = importlib.metadata.metadata("gdn-core")["Requires-Python"]
    assert required == ">=3.10", "no upper bound: the next Python installs it too"


@pytest.mark.report("E03")
@pytest.mark.parametrize("python", ["3.10", "3.14"])
@pytest.mark.parametrize(
    ("system", "machine", "backends"),
    [
        ("Linux", "x86_64", {"gdn-cpu", "gdn-cuda"}),
        ("Linux", "aarch64", {"gdn-cpu", "gdn-cuda"}),
        ("Linux", "riscv64", set()),
        ("Darwin", "arm64", set()),
        ("Darwin", "x86_64", set()),
        ("Windows", "AMD64", set()),
    ],
)
def test_the_extras_ask_for_backends_where_wheels_exist_and_else_for_nothing(system, machine, backends, python):
    packaging = pytest.importorskip("packaging.requirements")
    where = {"platform_system": system, "platform_machine": machine, "python_version": python}
    requirements = [packaging.Requirement(text) for text in importlib.metadata.requires("gdn-core")]
    wanted = {
        requirement.name
        for requirement in requirements
        for extra in ("", "cpu", "cuda")
        if requirement.marker is None or requirement.marker.evaluate(where | {"extra": extra})
    }
    assert wanted == {"torch", "rich"} | backends


def imports(path):
    """List the top-level packages that a module imports as it is imported itself."""
    tree = ast.parse(path.read_text())
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.report("E05")
def test_the_library_imports_torch_and_the_standard_library_only():
    optional = {"rich": "cli", "transformers": "integrations", "triton": "triton_backend"}
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        allowed = {"torch", "gdn_core", *sys.stdlib_module_names}
        allowed |= {package for package, place in optional.items() if relative.parts[0] == place}
        assert set(imports(path)) <= allowed, relative


@pytest.mark.report("E05", "E03")
@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "x86_64")])
def test_the_reference_runs_where_nothing_else_is_installed(system, machine):
    found = run_python(f"""
        import importlib.metadata, json, platform, sys
        import torch
        for name in ("triton", "transformers", "rich", "fla", "gdn_cpu", "gdn_cuda", "causal_conv1d"):
            sys.modules[name] = None
        importlib.metadata.entry_points = lambda **_: ()
        platform.system, platform.machine = lambda: {system!r}, lambda: {machine!r}
        import gdn_core
        from gdn_core.testing import inputs, oracle
        arguments = inputs.delta_rule_arguments([3, 2], 1, 2, 8, 4)
        o, _ = gdn_core.chunk_gated_delta_rule(**arguments)
        expected, _ = oracle.chunk_gated_delta_rule(**arguments)
        print(json.dumps(float((o - expected).norm() / expected.norm())))
    """)
    assert found < 1e-5


def elf_sections(path):
    elf = pytest.importorskip("elftools.elf.elffile")
    file = elf.ELFFile(io.BytesIO(path.read_bytes()))
    return {section.name: section for section in file.iter_sections()}


def versioned_symbols(path):
    """List (symbol, version set, version) of what an ELF file asks shared libraries for, as (x, "GLIBC", (2, 14))."""
    sections = elf_sections(path)
    versions = {
        need["vna_other"]: need.name for _, needs in sections[".gnu.version_r"].iter_versions() for need in needs
    }
    for symbol, index in zip(sections[".dynsym"].iter_symbols(), sections[".gnu.version"].iter_symbols(), strict=True):
        name = versions.get(index["ndx"])
        if name is not None:
            family, _, number = name.partition("_")
            yield symbol.name, family, tuple(map(int, number.split(".")))


# What glibc 2.28 and the C++ runtime beside it have. Since 2.34 the symbols of libdl and libpthread carry its version;
# built on the older one, the same code asks for theirs. Of the C++ runtime, what is newer is linked in there.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
MERGED_INTO_LIBC = re.compile(r"(dl(open|sym|addr|error|close|iterate_phdr)|(__)?pthread_\w+)")
LINKED_IN = ("_ZSt28__throw_bad_array_new_lengthv",)


@pytest.mark.report("E06")
def test_the_extension_asks_for_nothing_newer_than_glibc_2_28(native_module):
    newer = [
        (symbol, family, version)
        for symbol, family, version in versioned_symbols(native_module)
        if version > NEWEST[family] and symbol not in LINKED_IN and not MERGED_INTO_LIBC.fullmatch(symbol)
    ]
    assert not newer


def needed(path):
    """List the shared libraries that an ELF file asks the loader for."""
    return [tag.needed for tag in elf_sections(path)[".dynamic"].iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


@pytest.mark.report("E07", "E01")
def test_the_extension_needs_no_library_that_an_environment_may_lack(native_module):
    allowed = r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux[-\w]*)\.so\.\d+"
    assert not [name for name in needed(native_module) if not re.fullmatch(allowed, name)]


@pytest.mark.report("E07")
def test_no_CUDA_library_is_loaded_or_needed():
    found = run_python("""
        import json, sys
        import gdn_core
        infos = {b.name: [b.available, b.reason, b.install] for b in gdn_core.backends()}
        maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
        print(json.dumps([infos["cuda"], "libcudart" in maps or "libcuda.so" in maps]))
    """)
    (available, reason, install), mapped = found
    if not torch.cuda.is_available() and torch.version.cuda is None:
        assert not mapped
        assert not available
        # What helps: the package where it is missing, else a driver, which pip cannot bring.
        assert ("gdn-core[cuda]" in install) if "not installed" in reason else (install is None and "libcuda" in reason)


@pytest.mark.report("E08")
@pytest.mark.parametrize("op", gdn_core.OPS)
def test_a_person_can_see_what_runs_and_why_not_something_faster(op):
    explanation = gdn_core.explain(op, **small_call(op))
    text = str(explanation)
    assert f"{op} runs on {explanation.backend}" in text
    for info in gdn_core.backends():
        assert info.name in text
        if not info.available:
            assert info.reason in text


# Two calls of one operation in a process of their own: what was said there once is not said again.
FALLING_BACK = """
    import importlib.metadata, json, logging
    import torch
    if {nothing_installed}:
        importlib.metadata.entry_points = lambda **_: ()
    import gdn_core
    from gdn_core.testing import inputs

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append([record.levelname, record.getMessage()])
    logging.getLogger("gdn_core").addHandler(handler)
    logging.getLogger("gdn_core").setLevel(logging.INFO)
    arguments = inputs.delta_rule_arguments([3, 2], 1, 2, 8, 4)
    if not {nothing_installed}:
        arguments |= {{name: arguments[name].double() for name in "qkv"}}
    for _ in range(2):
        gdn_core.chunk_gated_delta_rule(**arguments)
    print(json.dumps(said))
"""


@pytest.mark.report("E08")
def test_a_call_that_the_backend_declines_says_so_once(cpu_backend):
    ((level, message),) = run_python(textwrap.dedent(FALLING_BACK).format(nothing_installed=False))
    assert level == "INFO"
    assert message.startswith("chunk_gated_delta_rule runs on another backend than 'cpu': q: float64")


@pytest.mark.report("E08")
def test_a_backend_that_is_not_installed_is_missed_once():
    ((level, message),) = run_python(textwrap.dedent(FALLING_BACK).format(nothing_installed=True))
    assert level == "WARNING"
    assert message.startswith("gdn runs on the slow reference: backend 'cpu'")
    assert f'pip install "gdn-core[cpu]=={gdn_core.__version__}"' in message


FAKE_FLA = """
    import json, sys, types
    import torch
    import transformers.models.{family}.modeling_{family} as modeling
    import gdn_core
    import gdn_core.integrations.transformers as patching

    asked = []

    def fla(name):
        def function(query, *args, **kwargs):
            asked.append([name, query.device.type])
            return query, None
        return function

    # As transformers binds them where fla is installed.
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    for name in names:
        setattr(modeling, name, fla(name))
    originals = [getattr(modeling, name) for name in names]
    patching.patch()

    def call(name, device):
        x = torch.ones(1, 2, 2, 8, device=device)
        gates = torch.ones(1, 2, 2, device=device)
        with torch.no_grad():
            getattr(modeling, name)(x, x, x, g=-gates, beta=gates, output_final_state=True)

    with gdn_core.record_calls() as calls:
        for name in names:
            for device in ("cpu", "meta"):
                call(name, device)
    patching.unpatch()
    print(json.dumps({{
        "asked": asked,
        "ours": sorted(op for op, _ in calls),
        "restored": originals == [getattr(modeling, name) for name in names],
    }}))
"""


@pytest.mark.report("E09")
def test_the_patch_takes_CPU_tensors_and_leaves_the_others_to_fla():
    pytest.importorskip("transformers")
    found = run_python(textwrap.dedent(FAKE_FLA).format(family="qwen3_next"))
    assert found["asked"] == [
        ["torch_chunk_gated_delta_rule", "meta"],
        ["torch_recurrent_gated_delta_rule", "meta"],
    ]
    assert found["ours"] == ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
    assert found["restored"]
