from pallas_kernels.norm.api import layernorm as layernorm
from pallas_kernels.norm.api import rmsnorm as rmsnorm
