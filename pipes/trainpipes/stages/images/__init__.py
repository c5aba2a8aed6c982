"""Stages on images: a column of arrays, uint8 or floats ``[C, H, W]``, in rows of any source.

pixels                 functions on one image: bytes to pixels, cuts and sizes
image_stage            what the stages share: each row by itself, with numbers drawn for it
decode_image           bytes to pixels
resize                 another size
crop                   parts of a size: random_crop, center_crop
random_resized_crop    a random part, brought to one size
flip                   mirrored, or not, by chance
normalize              floats around 0; also of whole batches
image_transform        a transform of torchvision's, or any other, with torch's generator seeded by the row
"""
