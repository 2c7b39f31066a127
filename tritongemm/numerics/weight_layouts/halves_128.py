"""Weight layout: four bits a number, number k of each 128 along K in the same byte as number k + 64."""

from tritongemm.numerics.weight_layouts._halves import Halves


class Halves128(Halves):
    """Spans of 128 elements along K."""

    span = 128
