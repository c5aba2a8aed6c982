"""Files of sound and video as arrays, by libsndfile and FFmpeg: no stages, no rows."""
