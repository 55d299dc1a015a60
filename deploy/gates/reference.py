"""The default reference text; its perplexity shows whether a policy still knows the language.

It is public-domain English prose of several kinds. Set `[deploy.gates.perplexity] reference` to
measure on a text file of your own.
"""

TEXT = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must \
be in want of a wife. However little known the feelings or views of such a man may be on his \
first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding \
families, that he is considered as the rightful property of some one or other of their \
daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let \
at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just \
been here, and she told me all about it." Mr. Bennet made no answer. "Do not you want to know \
who has taken it?" cried his wife impatiently. "You want to tell me, and I have no objection to \
hearing it."

Four score and seven years ago our fathers brought forth on this continent, a new nation, \
conceived in Liberty, and dedicated to the proposition that all men are created equal. Now we \
are engaged in a great civil war, testing whether that nation, or any nation so conceived and so \
dedicated, can long endure. We are met on a great battle-field of that war. We have come to \
dedicate a portion of that field, as a final resting place for those who here gave their lives \
that that nation might live. It is altogether fitting and proper that we should do this.

When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the \
distribution of the inhabitants of South America, and in the geological relations of the present \
to the past inhabitants of that continent. These facts seemed to me to throw some light on the \
origin of species, that mystery of mysteries, as it has been called by one of our greatest \
philosophers. On my return home, it occurred to me that something might perhaps be made out on \
this question by patiently accumulating and reflecting on all sorts of facts which could \
possibly have any bearing on it. After five years' work I allowed myself to speculate on the \
subject, and drew up some short notes; these I enlarged into a sketch of the conclusions, which \
then seemed to me probable.

Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my \
purse, and nothing particular to interest me on shore, I thought I would sail about a little and \
see the watery part of the world. It is a way I have of driving off the spleen and regulating \
the circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, \
drizzly November in my soul; whenever I find myself involuntarily pausing before coffin \
warehouses, and bringing up the rear of every funeral I meet; then, I account it high time to \
get to sea as soon as I can.

Alice was beginning to get very tired of sitting by her sister on the bank, and of having \
nothing to do: once or twice she had peeped into the book her sister was reading, but it had no \
pictures or conversations in it, "and what is the use of a book," thought Alice, "without \
pictures or conversations?" So she was considering in her own mind, as well as she could, for \
the hot day made her feel very sleepy and stupid, whether the pleasure of making a daisy-chain \
would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit \
with pink eyes ran close by her.

It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of \
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of \
Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair, \
we had everything before us, we had nothing before us, we were all going direct to Heaven, we \
were all going direct the other way.

To boil an egg, put it into cold water, bring the water to the boil, take the pan from the fire \
and let it stand under a lid for ten minutes. Then pour the hot water away, cover the egg with \
cold water, and peel it when it can be held in the hand. A fresh egg is harder to peel than an \
old one. To write a letter of complaint, say first what was bought and when, then what is wrong \
with it, and last what you want to be done: an exchange, a repair, or the money back. Keep a \
copy, and be civil, for the person who reads it is seldom the person who made the mistake.
"""
