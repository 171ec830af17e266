"""Bytes: the payload header, tensor frames, index codes and value codes. The only room that knows the layout.

    payload (one a bucket)   header | frame | frame | ...
    frame (one a tensor)     header | positions | values
    positions                header | bytes of the index code
    values                   header | bytes of the value code

All integers are little endian; every part is padded with zeros to a multiple of 4 bytes. `docs/format.md` gives the
fields. What arrives from another worker is checked before it is used: sizes, codes, ranges and the checksum.
"""
