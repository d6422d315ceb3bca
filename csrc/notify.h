/* SPDX-License-Identifier: Apache-2.0
 *
 * notify: one eventfd for all the batches that an event loop waits for. A finished batch puts
 * itself on the notifier's list; the eventfd is written only when the list was empty, so a burst of
 * completions costs one wake-up.
 *
 * Invariants
 *   N1  A batch is on a list at most once: whoever exchanges batch->notifier for NULL puts it there.
 *   N2  The list holds a reference to each of its batches, a batch one to its notifier until then.
 */
#ifndef KVIO_NOTIFY_H
#define KVIO_NOTIFY_H

#include "base.h"

struct kvio_batch;

/* The batch is over: hands it to its notifier, if it has one. */
void kvio_notify_deliver(struct kvio_batch *batch);

#endif
