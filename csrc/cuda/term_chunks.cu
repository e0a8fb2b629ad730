// Instances for 2 accumulators at the widths of their gradients.
#include "cuda/term_chunks.cuh"
