"""The parameter shapes of well-known models, in the order of the model, made from their architecture."""

from __future__ import annotations

from math import prod

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """161 tensors, 25,557,032 values (He et al., CVPR 2016)."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def vgg16() -> list[Shape]:
    """32 tensors, 138,357,544 values (Simonyan and Zisserman, ICLR 2015)."""
    shapes: list[Shape] = []
    channels = 3
    for width, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            shapes += [(width, channels, 3, 3), (width,)]
            channels = width
    for rows, columns in ((4096, 25088), (4096, 4096), (1000, 4096)):
        shapes += [(rows, columns), (rows,)]
    return shapes


def bert_base() -> list[Shape]:
    """199 tensors, 109,482,240 values (Devlin et al., NAACL 2019; uncased, with pooler)."""
    width, norm = 768, [(768,), (768,)]
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm]
    for _ in range(12):
        for rows, columns in ((width, width),) * 4:
            shapes += [(rows, columns), (rows,)]
        shapes += [*norm, (3072, width), (3072,), (width, 3072), (width,), *norm]
    return [*shapes, (width, width), (width,)]


def gpt2() -> list[Shape]:
    """148 tensors, 124,439,808 values (Radford et al., 2019; the small model)."""
    width, norm = 768, [(768,), (768,)]
    shapes: list[Shape] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [*norm, (width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [*norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, *norm]


MODELS = {"resnet50": resnet50, "vgg16": vgg16, "bert-base": bert_base, "gpt2": gpt2}


def values(shapes: list[Shape]) -> int:
    """The number of values in tensors of `shapes`."""
    return sum(prod(shape) for shape in shapes)
