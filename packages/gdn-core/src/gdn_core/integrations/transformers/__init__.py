# SPDX-License-Identifier: Apache-2.0
"""Run the Gated DeltaNet layers of transformers' models on gdn's operations.

    import gdn_core.integrations.transformers as gdn_transformers

    gdn_transformers.patch()        # every model that has such layers, loaded before or after
    model.generate(...)
    gdn_transformers.unpatch()      # the very functions that were there before

A modeling module is patched when it defines the gated delta rule: Qwen3-Next, Qwen3.5, its mixtures of experts,
OLMo Hybrid, and whatever else shares the names. Those already imported are patched at once, the others as they are
imported. Two levels are replaced in each:

- the layer's forward, so that gating too runs in gdn: a decode step is convolution update, gating with the delta
  rule, gated norm, on the states that transformers' own cache holds;
- the functions and the gated norm, which the original forward calls wherever the layer's is not eligible (a cache
  that records its past, packed sequences, offloaded weights, transformers before 5.24).

gdn takes calls that need no gradient, on devices for which it has a native backend. Training, export, autocast and
other devices keep the original code: fla's, where it is installed and the tensors are on a GPU.

transformers refuses to speculate with these models; `TransformersTarget` makes one the target of
`gdn_core.speculate.Engine`, and `ModelDrafter` a smaller one its drafter.

With `GDN_PATCH_TRANSFORMERS=1` in the environment, `import gdn_core` calls `patch()`. Nothing is installed into the
interpreter for that: a program that never imports gdn_core is not patched.
"""

from .install import is_patched, patch, patch_for_environment, patched, unpatch
from .layer import gated_delta_net_layers
from .plan import LayerPlan, plan_layers
from .target import ModelDrafter, TransformersTarget

__all__ = [
    "LayerPlan",
    "ModelDrafter",
    "TransformersTarget",
    "gated_delta_net_layers",
    "is_patched",
    "patch",
    "patch_for_environment",
    "patched",
    "plan_layers",
    "unpatch",
]
