-- Internal: per token 1 where scrubbing hides it, else 0.
CREATE MACRO masked_tokens(tokens, spans) AS
    CASE WHEN coalesce(len(spans), 0) = 0 THEN list_resize([]::TINYINT[], len(tokens), 0::TINYINT)
    ELSE list_transform(range(len(tokens)), lambda place: (len(list_filter(spans,
            lambda span: span.start <= place AND place < span."end")) > 0)::TINYINT) END
