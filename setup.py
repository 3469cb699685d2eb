"""Package metadata and extras; everything about tools is in pyproject.toml."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

README = Path(__file__).with_name("README.md")

EXTRAS = {
    # Packages that megatron-core imports on a machine without an accelerator; torch from the oldest to the
    # newest release tested (docs/design/compatibility.md). `tokenizers` reads the Hugging Face tokenizer file
    # that the example job accepts.
    "megatron": ["torch>=2.7,<2.15", "megatron-core>=0.12.1,<0.20", "numpy", "tokenizers"],
    "triton": ["triton>=3.4; platform_system == 'Linux'"],
    # Fused RMSNorm and SwiGLU on GPUs.
    "liger": ["liger-kernel>=0.8.5; platform_system == 'Linux'"],
    # Hugging Face's files (DeepSeek's may have factors in F8_E8M0), and progress bars of `weights`.
    "weights": ["safetensors>=0.6.2", "tqdm"],
    # CRC-32 at four times zlib's rate, for manifests of checkpoints.
    "checkpoints": ["isal>=1.7"],
    # Parser of shell scripts, for `python -m mindspeed_dsa migrate`.
    "migrate": ["tree-sitter>=0.23", "tree-sitter-bash>=0.23"],
    # Hugging Face's DeepSeek-V3.2 and GLM-5 on these operators, and a trainer for them.
    "transformers": ["torch>=2.7,<2.16", "transformers>=5.20,<6", "accelerate>=1.10", "peft>=0.17"],
    # Release whose converters change configurations; the older one also works. Its modules import Triton on
    # every machine.
    "torchtitan": [
        "torch>=2.13,<2.15",
        "torchtitan>=0.3,<0.4; python_version >= '3.11'",
        "triton>=3.4; platform_system == 'Linux'",
    ],
    "viz": ["matplotlib", "tensorboard", "tqdm"],
    # The pages as a site, with a reference of the public interface.
    "site": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"],
    # Triton's kernels are tested in its interpreter, which needs no GPU.
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.5",
        "hypothesis",
        "triton>=3.3; platform_system == 'Linux'",
        "transformers>=5.20,<6",  # Hugging Face's DeepSeek-V3.2 and GLM-5
        "psutil",  # Megatron's multi-process writer of checkpoints queries memory with it
        "setuptools>=77",  # builds examples/plugin without the network
        "build",  # builds the wheel that tests install
    ],
}
EXTRAS["test"] += [*EXTRAS["checkpoints"], *EXTRAS["migrate"], *EXTRAS["weights"]]
EXTRAS["dev"] = [*EXTRAS["test"], *EXTRAS["site"], "ruff", "mypy"]

setup(
    name="mindspeed_dsa",
    version="0.2.0",
    description="Accelerates Megatron training without touching Megatron, DeepSeek Sparse Attention first",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    # Folders of features need no __init__.py: their feature.py is enough.
    packages=find_namespace_packages(include=["mindspeed_dsa", "mindspeed_dsa.*"], exclude=["*.__pycache__"]),
    package_data={
        "mindspeed_dsa": ["py.typed"],
        "mindspeed_dsa.session": ["*.json"],
        "mindspeed_dsa.tools.compat": ["*.json"],
        "mindspeed_dsa.tools.migrate": ["*.json"],
    },
    install_requires=["wrapt>=1.16", "packaging>=24.2"],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
