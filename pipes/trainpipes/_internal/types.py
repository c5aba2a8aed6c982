"""Types that every room writes."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
