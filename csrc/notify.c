/* SPDX-License-Identifier: Apache-2.0 */
#include "notify.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "batch.h"

struct kvio_notifier {
  int fd;
  _Atomic uint32_t refs; /* the loop's, and one for each batch that will report here */
  _Atomic(struct kvio_batch *) head;
};

int kvio_notifier_create(struct kvio_notifier **out)
{
  struct kvio_notifier *notifier = calloc(1, sizeof(*notifier));
  if (!notifier)
    return -ENOMEM;
  notifier->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (notifier->fd < 0) {
    int rc = -errno;
    free(notifier);
    return rc;
  }
  atomic_init(&notifier->refs, 1);
  *out = notifier;
  return 0;
}

int kvio_notifier_fd(const struct kvio_notifier *notifier)
{
  return notifier->fd;
}

static struct kvio_batch *take_list(struct kvio_notifier *notifier)
{
  /* acquire: pairs with the release in push() */
  return atomic_exchange_explicit(&notifier->head, NULL, memory_order_acquire);
}

/* Puts a chain of batches on the list; the signal is for a list that was empty. */
static void push(struct kvio_notifier *notifier, struct kvio_batch *first, struct kvio_batch *last)
{
  struct kvio_batch *head = atomic_load_explicit(&notifier->head, memory_order_relaxed);
  do
    last->notify_next = head;
  while (!atomic_compare_exchange_weak_explicit(&notifier->head, &head, first, memory_order_release,
                                                memory_order_relaxed));
  if (!head)
    kvio_event_signal(notifier->fd);
}

void kvio_notifier_put(struct kvio_notifier *notifier)
{
  if (atomic_fetch_sub_explicit(&notifier->refs, 1, memory_order_acq_rel) != 1)
    return;
  /* Nobody can push any more. What lies here was not asked for. */
  for (struct kvio_batch *batch = take_list(notifier), *next; batch; batch = next) {
    next = batch->notify_next;
    kvio_batch_put(batch);
  }
  close(notifier->fd);
  free(notifier);
}

void kvio_notify_deliver(struct kvio_batch *batch)
{
  struct kvio_notifier *notifier = atomic_exchange(&batch->notifier, NULL); /* N1 */
  if (!notifier)
    return;
  push(notifier, batch, batch);
  kvio_notifier_put(notifier);
}

int kvio_batch_notify(struct kvio_batch *batch, struct kvio_notifier *notifier, uint64_t tag)
{
  if (atomic_exchange(&batch->notify_used, true))
    return -EBUSY;
  batch->notify_tag = tag;
  atomic_fetch_add_explicit(&batch->refs, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&notifier->refs, 1, memory_order_relaxed);
  /* seq_cst: the store comes before the look at the state, as in announce() the other way round */
  atomic_store(&batch->notifier, notifier);
  if (atomic_load(&batch->state) >= KVIO_BATCH_DONE)
    kvio_notify_deliver(batch);
  return 0;
}

uint32_t kvio_notifier_take(struct kvio_notifier *notifier, uint64_t *tags, uint32_t max)
{
  uint64_t value;
  uint32_t n = 0;
  /* The signal first: a batch that comes after the list was taken signals again. */
  while (read(notifier->fd, &value, sizeof(value)) < 0 && errno == EINTR)
    ;
  struct kvio_batch *batch = take_list(notifier);
  while (batch && n < max) {
    struct kvio_batch *next = batch->notify_next;
    tags[n++] = batch->notify_tag;
    kvio_batch_put(batch);
    batch = next;
  }
  if (!batch)
    return n;
  struct kvio_batch *last = batch;
  while (last->notify_next)
    last = last->notify_next;
  push(notifier, batch, last);
  return n;
}
