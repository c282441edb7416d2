"""TEXT: what models are judged on. Written for this purpose; changing it makes earlier figures incomparable."""

TEXT = """\
The ferry to the island left twice a day in summer and once in winter, and on the second of November it did not leave
at all. Marta found this out from a sheet of paper taped to the ticket window. The ink had run in the rain, so that
the word "cancelled" looked like a small blue river with a name. She set her suitcase down, sat on it, and counted the
money in her coat. There was enough for one night in the hotel above the bakery, or for three nights if she did not
eat. It was an easy choice, because the smell of bread came through the open door and settled the matter at once.

"You are waiting for the boat," said the baker, without turning round.

"I was. I suppose I am waiting for the weather now."

"The weather comes on Thursdays." He slid a loaf from the oven and knocked on the bottom of it with his knuckles, as
one knocks on the door of a neighbour. "Before that, it only practises. Do you want the end piece? People from the city
never want the end piece."

She took it. It was hot and nearly black, and it tasted of salt and of smoke. Outside the gulls were walking up and
down on the quay like officials with nothing to sign. Her brother would be standing on the other side of the water with
his hands in his pockets, looking at his watch, then at the sky, then at his watch again; he had never learned to trust
either. She decided to telephone him, and then remembered that the line had been broken since September.

## How a tide gauge works

A tide gauge measures the height of the sea against a fixed mark on land. The oldest ones were simple poles with painted
numbers, read by a person who wrote the level into a book every hour. Waves made this difficult, so the pole was put
into a well: a vertical pipe, open to the sea only through a small hole near its bottom. Water enters and leaves through
the hole too slowly to follow the waves, but quickly enough to follow the tide. Inside the well, the surface is calm.

Later a float was placed on the water in the well. The float hangs on a wire, the wire turns a wheel, and the wheel
moves a pen across a drum of paper, which a clock turns once a day. The result is a curve. In most places it rises and
falls twice in a little less than twenty-five hours, because the earth turns once a day under a moon that has itself
moved on in the meantime. When sun and moon pull in the same direction the range is largest, and the tide is called a
spring tide, although it has nothing to do with the season. Modern instruments send a short pulse of radio waves down to
the surface and measure how long the echo takes. Light travels about 30 centimetres in a nanosecond, so an error of one
centimetre in height is an error of less than a tenth of a nanosecond in time. The poles are still there as well. If the
electronics disagree with the painted numbers, the painted numbers are usually right.

Here is a short program that finds the times of high water in a list of measurements. It looks for values that are at
least as large as all of their neighbours within a window of three hours:

```python
from dataclasses import dataclass


@dataclass
class Reading:
    minute: int  # since midnight
    height_cm: float


def high_waters(readings: list[Reading], window_minutes: int = 180) -> list[Reading]:
    found = []
    for i, reading in enumerate(readings):
        neighbours = [
            other.height_cm
            for other in readings
            if abs(other.minute - reading.minute) <= window_minutes
        ]
        if reading.height_cm >= max(neighbours):
            if not found or reading.minute - found[-1].minute > window_minutes:
                found.append(reading)
    return found


if __name__ == "__main__":
    day = [Reading(minute, 200.0) for minute in range(0, 1440, 10)]
    print(len(high_waters(day)))
```

The loop compares every reading with every other one, which takes time proportional to the square of their number. For
one day that does not matter. For a hundred years of measurements it would be better to keep a queue of candidates.

## Onion soup for four people

You need one kilogram of onions, 60 grams of butter, two tablespoons of flour, one and a half litres of beef stock, a
glass of dry white wine, a bay leaf, salt, pepper, eight slices of old bread and 150 grams of grated cheese.

1. Peel the onions, cut them in half and slice them thinly. This takes about fifteen minutes and some tears.
2. Melt the butter in a heavy pot. Add the onions and a teaspoon of salt. Cook them over low heat for forty minutes, and
   stir more often towards the end. They should be brown like chestnuts, soft and sweet, but never burnt.
3. Sprinkle the flour over them, stir for two minutes, then pour in the wine and scrape the bottom of the pot.
4. Add the stock and the bay leaf. Let the soup simmer for half an hour. Season it with pepper, and more salt if needed.
5. Put the soup into four bowls, lay two slices of bread on each, cover them with cheese, and place the bowls under the
   grill until the cheese is melted and has dark spots.

Serve it at once, and warn your guests that the bowls are very hot.

## A letter

Dear Mr. Halloran,

Thank you for your letter of the 14th and for the drawings of the lighthouse. The committee met on Tuesday evening. We
agree with you that the lamp room has to be repaired first, since the rain now reaches the stairs. We do not agree that
the door should be painted red. It has been green since 1871, it is green in every photograph we own, and the captain of
the supply ship steers by it when the fog lifts. Please send us an estimate for the glass and for the copper of the
roof, in two separate columns, because they will be paid from two separate funds. I also have to ask you for the key to
the lower store, which was last seen in your left pocket.

Yours sincerely,
Agnes Pell, secretary

## Questions and answers

Q: What is the capital of France?
A: The capital of France is Paris. It lies on the river Seine in the north of the country and has been the seat of its
government, with short interruptions, for many hundreds of years.

Q: If a train travels 180 kilometres in two hours, how fast is it on average?
A: Average speed is distance divided by time. 180 kilometres divided by 2 hours is 90 kilometres per hour.

Q: Why is the sky blue?
A: Sunlight contains all colours. The molecules of the air scatter light of short wavelength much more strongly than
light of long wavelength, so blue light reaches our eyes from every direction of the sky, while red and yellow light
mostly goes straight on. In the evening the light has to pass through much more air. Most of the blue has been
scattered away before it arrives, and what is left is orange and red.

Q: Name three things that float and three that sink.
A: Wood, ice and cork float in water. Iron, sand and glass sink.

On Thursday the wind turned to the west, exactly as the baker had said, and by noon there was a boat. It was smaller
than the one in the timetable, and its captain was a girl of perhaps nineteen who wore a yellow hat and did not ask
anybody for a ticket. Marta stood at the rail with the end of a loaf under her arm. Halfway across, the girl stopped
the engine, so that everyone could hear a sound like a very large animal breathing, somewhere in the fog to the left
of them. Nobody spoke. Then the engine coughed twice and started again, and the island came out of the grey all at
once, with its one street, its green door, and a man on the quay who took his hands out of his pockets and waved.
"""
