from pallas_kernels.attention.api import attention as attention
from pallas_kernels.attention.api import saveable as saveable
