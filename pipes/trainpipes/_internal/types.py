"""Types that every room writes; a file of its own, since nothing is below it."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
