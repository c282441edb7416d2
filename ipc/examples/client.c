/* Submits one request of token ids to a running engine and prints the ids it answers with.
 *   tokring serve --ipc-listen /run/user/1000/tokring.sock
 *   cc -I ipc/include ipc/examples/client.c -o client && ./client /run/user/1000/tokring.sock 16 1 2 3 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tokring/tokring.h"

static struct tokring_request_record request_of(uint32_t max_tokens) {
  struct tokring_request_record record = {
      .slot_generation = 1,
      .parent_slot = 0xffffffffu,
      .max_tokens = max_tokens,
      .num_logprobs = -1,
      .num_prompt_logprobs = -1,
      .temperature = 0, /* greedy */
      .top_p = 1,
      .repetition_penalty = 1,
  };
  return record;
}

int main(int count, char **arguments) {
  if (count < 4) return fprintf(stderr, "usage: client SOCKET MAX_TOKENS ID...\n"), 2;
  int32_t ids[4096];
  uint32_t num_ids = 0;
  for (int i = 3; i < count && num_ids < 4096; ++i) ids[num_ids++] = atoi(arguments[i]);

  struct tokring_channel channel;
  if (tokring_connect(&channel, arguments[1], 1 << 20, 4 << 20, 16) != 0)
    return fprintf(stderr, "client: %s\n", channel.error), 1;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  struct tokring_request_record record = request_of((uint32_t)atoi(arguments[2]));
  record.arrival_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  if (tokring_submit(&channel, record, ids, num_ids, record.arrival_ns) != 1)
    return fprintf(stderr, "client: %s\n", channel.error), 1;

  for (;;) {
    struct tokring_frame_header header;
    struct tokring_step step;
    const uint8_t *frame = tokring_poll(&channel, &header);
    if (channel.error) return fprintf(stderr, "client: %s\n", channel.error), 1;
    if (frame == NULL) {
      if (tokring_sleep(&channel, 250) != 0) return fprintf(stderr, "client: %s\n", channel.error), 1;
      continue;
    }
    if (tokring_read_step(frame, &header, &step) == 0) {
      for (uint32_t row = 0; row < step.num_rows; ++row) printf("%d\n", step.token_id[row]);
      if (step.num_finished > 0) return step.finish->reason >= TOKRING_FINISH_REASON_ABORT;
    }
    tokring_release(&channel);
  }
}
