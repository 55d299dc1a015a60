"""One package for each protocol that clients speak; none imports another.

A protocol imports `http`, `gateway`, `access`, `wire` and what is below them. The same file has
the same job in every package, and a package leaves out the files that it does not need:

- `protocol`: the `Wire`, and the `Request` that a body asks for
- `request`: that `Request`, where building it takes a file of its own
- `body`: the pydantic model of a body, and readers for its parts other than messages
- `messages`: messages (blocks, items) of the protocol as messages of a `Conversation`
- `output`: the answer, as the body of a whole one and as the writer of a streamed one
- `output_blocks`, `output_items`: pieces of an answer as the parts that `output` sends
- `errors`: an error envelope other than OpenAI's
- `routes`: further endpoints of the protocol
- `store`, `sqlite_store`, `sqlite_thread`: the answers that the protocol keeps
"""
