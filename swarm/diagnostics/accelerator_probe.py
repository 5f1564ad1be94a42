"""A program that tests torch, the device and 8-bit arithmetic, and prints one JSON line.

`accelerator` runs it as a child process with a deadline.
"""

import json


def main() -> None:
    import torch

    result: dict[str, object] = {"torch": torch.__version__, "device": "cpu"}
    if torch.cuda.is_available():
        result |= {"device": "cuda", "name": torch.cuda.get_device_name(0)}
    elif torch.backends.mps.is_available():
        result |= {"device": "mps", "name": "Apple GPU"}
    device = str(result["device"])
    ones = torch.ones(8, 8, device=device)
    result["matmul"] = bool((ones @ ones == 8).all().item())
    try:
        from bitsandbytes.nn.modules import Linear8bitLt

        layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to(device)
        dtype = torch.float16 if device == "cuda" else torch.float32
        output = layer(torch.ones(2, 64, dtype=dtype, device=device))
        result["int8"] = bool(torch.isfinite(output).all().item())
    except (ImportError, RuntimeError, AttributeError, NotImplementedError, ValueError, OSError) as error:
        result["int8_error"] = " ".join(str(error).split())[:200] or type(error).__name__
    print(json.dumps(result))


if __name__ == "__main__":
    main()
