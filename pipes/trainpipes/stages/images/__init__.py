"""Stages on images: a column of arrays, uint8 or floats ``[C, H, W]``, in rows of any source.

decode_image       bytes to pixels, and pixels in another size
image_stages       resize, crops, flip, normalize: each row by itself, by numbers that are drawn for it
image_transform    a transform of torchvision's, or any other, with torch's generator seeded by the row
"""
