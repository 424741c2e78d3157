"""A tokenised corpus on disk: written once by all cores, opened by every later start in seconds, read through memory maps.

A store is a folder. It is complete when it has its manifest, which is written last; an interrupted build goes on.

| file | what |
|---|---|
| `plan.json` | what the store is made from: files with their sizes and times, tokenizer, options; its pieces |
| `00012.tokens` | the token ids of piece 12, uint16 or uint32, little-endian |
| `00012.documents` | its table of documents, uint64 [documents, 5], `token_buffer.COLUMNS` |
| `00012.counted` | which tokens are targets, uint8; only of prompts with completions, and of chats |
| `00012.json` | counts of the piece, SHA-256 of the table, 8 bytes of BLAKE2 for each MiB of the other files |
| `manifest.json` | the records of all pieces |
"""
