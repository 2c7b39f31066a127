"""Weight layout: four bits a number, number k of each 32 along K in the same byte as number k + 16."""

from tritongemm.numerics.weight_layouts._halves import Halves


class Halves32(Halves):
    """Spans of 32 elements along K."""

    span = 32
