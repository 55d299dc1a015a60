-- The end of `feedback_signals` with a cap: no user has more than the cap of one window.
-- Users are counted separately and joined, because a window function over the rows would sort all
-- of them.
, of_users AS (
    SELECT tenant, "user", $window AS bucket, count(*) AS num_own,
        sum(count(*)) OVER (PARTITION BY tenant, bucket) AS num_all
    FROM checked WHERE unused_because IS NULL GROUP BY tenant, "user", bucket
)
SELECT c.*, CASE WHEN u.num_own IS NULL THEN 1.0
    ELSE least(1.0, $user_cap * u.num_all / u.num_own) END::DOUBLE AS influence
FROM checked AS c LEFT JOIN of_users AS u
    ON u.tenant = c.tenant AND u."user" = c."user" AND u.bucket = $window
