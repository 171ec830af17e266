"""The one part of the build that setup.cfg cannot say: the native kernels, which the package can do without."""

from glob import glob

from setuptools import Extension, setup

_FOLDER = "hvd_gradcomp/ops/native/csrc"

# Every result must have the bits of the numpy reference, so nothing here may let the compiler round otherwise: no
# fast-math, and no multiplication and addition fused into one. What is allowed is to ignore errno and float traps.
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
]

setup(
    ext_modules=[
        Extension(
            "hvd_gradcomp.ops.native._kernels",
            sources=sorted(glob(f"{_FOLDER}/*.cpp")),
            depends=sorted(glob(f"{_FOLDER}/*.h") + glob(f"{_FOLDER}/*.inc")),
            extra_compile_args=_FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            # Python's stable interface: one build serves every version from 3.10 on.
            py_limited_api=True,
            # Without a compiler the package installs all the same; hvd_gradcomp.ops.native says what it lost.
            optional=True,
        )
    ]
)
