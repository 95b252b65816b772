"""What torch lacks of derivatives and of maps, as errors by name, each with a way.

The texts are those of torch 2.11 to 2.13: https://docs.pytorch.org/docs/stable/func.ux_limitations.html
"""

from __future__ import annotations

from fnaccel.errors import CapabilityError, FnaccelError

_MATH = (
    "the math form has them: with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): around "
    "the model's call"
)
_KNOWN = (
    (
        ("derivative for", "scaled_dot_product", "not implemented"),
        "torch's fused attention has no second derivative",
        _MATH,
    ),
    (("forward AD", "scaled_dot_product"), "torch's fused attention has no forward derivative (jvp)", _MATH),
    (
        ("mutate a captured Tensor",),
        "the loss changes a tensor in place inside of torch.func, such as the running statistics of a batch "
        "norm in training mode",
        "give the call buffers of its own: fa.call(model, {**params, **{name: b.clone() for name, b in "
        "model.named_buffers()}}, x); or a norm over each row, such as nn.GroupNorm",
    ),
    (
        ("randomness error mode",),
        "the loss draws random numbers inside of torch.func.vmap, such as dropout",
        'torch.func.vmap(fn, randomness="different"), or "same"',
    ),
    *(
        (
            (text,),
            "the loss reads a tensor on the host inside of torch.func.vmap: float(x), x.item(), or if x > 0",
            "compute with the tensor itself: torch.where in the place of if",
        )
        for text in ("calling .item() on a Tensor", "data-dependent control flow")
    ),
    (
        ("operators that can support dynamic shape",),
        "the loss makes a tensor whose length depends on values inside of torch.func.vmap, such as x[x > 0]",
        "keep the shape: torch.where(mask, x, 0)",
    ),
    (
        ("a functorch transform",),
        "the loss calls .backward() or .requires_grad_() inside of torch.func",
        "torch.func.grad(fn)(x) in their place, which can be differentiated again",
    ),
    (
        ("must implement the jvp function",),
        "a forward derivative through fa.remat, or through a function of autograd without one",
        "leave fa.remat out of this step, or take vector-Jacobian products: torch.func.vjp",
    ),
    (
        ("override the setup_context staticmethod",),
        "a function of autograd in the model can't be used inside of torch.func: one of your own, or that "
        "of a full backward hook",
        "write it with setup_context, or remove the hook (register_full_backward_hook)",
    ),
    (
        ("Batching rule not implemented",),
        "torch.func.vmap has no rule for an operation of the model",
        "a loop over the rows in the place of vmap; or other layers",
    ),
    (
        ("yet support saved tensor hooks",),
        "torch.func can't differentiate torch.utils.checkpoint",
        "fa.remat(step), and fa.call(model, params, ...) inside of the loss",
    ),
)


def lacking(error: BaseException) -> CapabilityError | None:
    """The error for something that torch can't differentiate or map, in the place of one of torch's."""
    if isinstance(error, RuntimeError) and not isinstance(error, FnaccelError):
        text = str(error)
        for parts, what, fix in _KNOWN:
            if all(part in text for part in parts):
                return CapabilityError(what, where="the loss function", fix=fix)
    return None
