# SPDX-License-Identifier: Apache-2.0
"""The field reports, by id: what each is a kind of, and the operations it concerns.

Faults that users of other implementations reported, as kinds of cases. A test names those it covers in its marker
`report`; `test_field_report_list.py` fails for an id that no test covers.
"""

from typing import NamedTuple


class Report(NamedTuple):
    kind: str
    ops: str


REPORTS = {
    "A01": Report("decays too small to divide by", "chunk"),
    "A02": Report("ratios of decays that overflow", "chunk"),
    "A04": Report("a rate that overflows times a softplus of zero", "gating, decode"),
    "A05": Report("an infinite log decay as a reset", "chunk, decode"),
    "A06": Report("gates rounded to half precision", "gating, decode, CUDA"),
    "A08": Report("a state rounded to half precision", "decode, speculation, CUDA"),
    "A09": Report("no decay at all", "chunk"),
    "A10": Report("powers of 2 mixed with natural exponentials", "chunk"),
    # Of gates with a decay for each channel of k, which no operation here has: what is left of it is one for each head.
    "A11": Report("strong decays that are clamped, beside weak ones", "chunk, decode"),
    "A12": Report("outputs that later tokens change", "chunk, decode, convolution"),
    "A13": Report("wrong decays that a zero initial state hides", "chunk"),
    "A15": Report("states dropped between two parts of a prompt", "chunk, convolution"),
    "A16": Report("states of the wrong heads or shape", "chunk"),
    "A17": Report("value heads that read the wrong key head", "chunk, decode, speculation, CUDA"),
    "A18": Report("a normalisation flag that does nothing", "chunk"),
    "A19": Report("linear decays where their logarithm is meant", "core"),
    "A22": Report("update strengths of another row or head", "decode"),
    "B01": Report("no accepted token", "speculation"),
    "B02": Report("no accepted token in the convolution", "speculative convolution"),
    "B03": Report("a plain step after a speculative one", "speculation, decode"),
    "B04": Report("every number of accepted tokens", "speculation, convolution"),
    "B07": Report("slots beyond 32-bit offsets", "decode, speculation, CUDA"),
    "B10": Report("padding rows that leak", "decode, speculation, convolution, CUDA"),
    "B11": Report("fewer slots than rows", "convolution, decode"),
    "B12": Report("output rows that nobody writes", "decode, speculation, CUDA"),
    "B13": Report("stale states read by fresh sequences", "chunk, convolution, decode"),
    "B14": Report("fresh prompts taken for draft rows", "core"),
    "B15": Report("slots beyond the pool", "all with slots"),
    "B16": Report("states at chunk boundaries", "chunk"),
    "B21": Report("rejected drafts that change the result", "speculation, decode"),
    "B22": Report("results that depend on the batch or the threads", "all"),
    "B24": Report("two rows on one slot", "decode"),
    "C01": Report("empty sequences", "chunk, convolution, speculation"),
    "C02": Report("packed against separate sequences", "chunk, convolution"),
    "C04": Report("a batch together with offsets", "chunk, convolution"),
    "C05": Report("sequences of uneven lengths", "chunk, convolution"),
    "C07": Report("sequences shorter than the kernel", "convolution"),
    "C08": Report("strides of the convolution's input", "convolution"),
    "C09": Report("odd numbers of channels", "convolution"),
    "C10": Report("kernel widths other than 4", "convolution"),
    "C11": Report("states longer than the history", "convolution update"),
    "C14": Report("views of a projection as inputs", "all"),
    "C15": Report("state layouts between prefill and decode", "chunk, decode"),
    "C16": Report("pools with gaps between slots", "decode, chunk"),
    "C17": Report("head dimensions other than 64 and 128", "chunk, decode"),
    "C18": Report("index dtypes and strides", "all with sequences"),
    "C19": Report("gates passed in the other order", "core"),
    "C20": Report("keywords dropped by callers that filter them", "core"),
    "C21": Report("positional order of the convolution", "convolution"),
    "C22": Report("gradients detached without a word", "core"),
    "C23": Report("empty calls", "all"),
    "D01": Report("tensors of another GPU than the current one", "CUDA"),
    "D02": Report("mutation schemas and graph breaks", "all in place"),
    "D04": Report("padding rows in CUDA graphs", "CUDA"),
    "D05": Report("half-precision instructions without tiles", "dispatch"),
    "D06": Report("processors without AVX-512", "dispatch"),
    "D07": Report("threads inside of threads", "chunk"),
    "D08": Report("two OpenMP runtimes in one process", "packages"),
    "D10": Report("states walked against their layout", "decode"),
    "D11": Report("half precision slower than fp32", "chunk"),
    "E01": Report("another version of torch", "packages"),
    "E03": Report("platforms and Pythons without wheels", "packages"),
    "E05": Report("no triton, no Linux", "core"),
    "E06": Report("older glibc", "packages"),
    "E07": Report("another CUDA, or none", "CUDA"),
    "E08": Report("a slow path taken without a word", "core"),
    "E09": Report("patches that ignore the device", "core"),
}
