"""Error-compensated rounding of one weight; knows no file, model or format."""
