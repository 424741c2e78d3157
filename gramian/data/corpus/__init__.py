"""The records of a corpus: files are cut into pieces, pieces are read record by record, records become tokens."""
