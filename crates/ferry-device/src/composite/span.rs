//! `linear` and `stripe`: every byte is on one component. What fails there fails here.

use super::component::{Component, flush_and_wait, flush_each, host_free, slowest, unflushed};
use super::gather::{Gather, Outcome};
use super::header::COMPONENTS_MAX;
use super::kind::Kind;
use super::layout::{Layout, Slice};
use crate::buffer::AlignedBuf;
use crate::device::{BlockDevice, ComponentState, ComponentStats, Io, IoDone, check_range};
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;

/// Several devices as one, without redundancy.
pub struct SpanDevice {
    components: Vec<Arc<Component>>,
    layout: Layout,
}

impl SpanDevice {
    /// `parts` are devices with their names and the bytes behind their heads that may be used, in
    /// their order. `chunk` is a stripe's, in bytes.
    ///
    /// # Panics
    /// For a mirror, for no part and for more than [`COMPONENTS_MAX`].
    pub fn new(kind: Kind, parts: Vec<(String, Arc<dyn BlockDevice>, u64)>, chunk: u64) -> Self {
        assert!((1..=COMPONENTS_MAX).contains(&parts.len()), "{} components", parts.len());
        let lens: Vec<u64> = parts.iter().map(|(_, _, len)| *len).collect();
        let components =
            parts.into_iter().map(|(name, dev, _)| Component::new(name, dev)).collect();
        Self { components, layout: Layout::new(kind, &lens, chunk) }
    }

    fn write_request(&self, io: (u64, Arc<AlignedBuf>, IoDone), batches: &mut [Vec<Io>]) {
        let (offset, buf, done) = io;
        if let Err(error) = check_range(self.layout.capacity(), offset, buf.len() as u64) {
            return done(Err(error));
        }
        let slices: Vec<Slice> = self.layout.slices(offset, buf.len() as u64).collect();
        if let [slice] = slices[..] {
            let request = self.components[slice.component].write_request(slice.offset, buf, done);
            return batches[slice.component].push(request);
        }
        let gather = Gather::new(slices.len(), Box::new(move |outcome| done(outcome.result())));
        for slice in slices {
            let part = Arc::new(copy_of(&buf, slice));
            let done = gather.part(slice.component);
            batches[slice.component].push(self.components[slice.component].write_request(
                slice.offset,
                part,
                done,
            ));
        }
    }

    /// A read that spans components: each part has a buffer of its own, as [`copy_of`] says.
    fn start_parts(
        &self,
        ring: &dyn ReadRing,
        slices: &[Slice],
        mut buf: Arc<AlignedBuf>,
        done: ReadDone,
    ) {
        let parts = Arc::new(Mutex::new(Vec::with_capacity(slices.len())));
        let read = Arc::clone(&parts);
        let ended = move |outcome: Outcome| {
            let whole = Arc::get_mut(&mut buf).expect("nobody else has a share");
            for (at, part) in parts.lock().drain(..) {
                let part: Arc<AlignedBuf> = part;
                whole[at..at + part.len()].copy_from_slice(&part);
            }
            done(outcome.result().map(|()| buf));
        };
        let gather = Gather::new(slices.len(), Box::new(ended));
        for slice in slices {
            let (read, done) = (Arc::clone(&read), gather.part(slice.component));
            let (at, part) = (slice.at as usize, AlignedBuf::zeroed(slice.len as usize));
            let part_done = move |result: io::Result<_>| {
                done(result.map(|part| read.lock().push((at, part))));
            };
            let component = &self.components[slice.component];
            component.start_read(ring, slice.offset, Arc::new(part), Box::new(part_done));
        }
    }

    fn flush_request(&self, done: IoDone) {
        let these = unflushed(self.components.iter().enumerate());
        if these.is_empty() {
            return done(Ok(()));
        }
        let gather = Gather::new(these.len(), Box::new(move |outcome| done(outcome.result())));
        flush_each(&these, &gather);
    }
}

/// The bytes of one slice. A request has a buffer of its own, so a transfer that spans components
/// is copied: at memory's speed, and only where it does.
fn copy_of(buf: &AlignedBuf, slice: Slice) -> AlignedBuf {
    let mut part = AlignedBuf::zeroed(slice.len as usize);
    part.copy_from_slice(&buf[slice.at as usize..(slice.at + slice.len) as usize]);
    part
}

impl BlockDevice for SpanDevice {
    fn capacity(&self) -> u64 {
        self.layout.capacity()
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.layout.capacity(), offset, buf.len() as u64)?;
        for slice in self.layout.slices(offset, buf.len() as u64) {
            let component = &self.components[slice.component];
            if slice.len == buf.len() as u64 {
                return component.read(slice.offset, buf);
            }
            let mut part = AlignedBuf::zeroed(slice.len as usize);
            component.read(slice.offset, &mut part)?;
            buf[slice.at as usize..(slice.at + slice.len) as usize].copy_from_slice(&part);
        }
        Ok(())
    }

    fn start_read(&self, ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        let len = buf.len() as u64;
        if let Err(error) = check_range(self.layout.capacity(), offset, len) {
            return done(Err(error));
        }
        let slices: Vec<Slice> = self.layout.slices(offset, len).collect();
        match slices[..] {
            [slice] => {
                self.components[slice.component].start_read(ring, slice.offset, buf, done);
            }
            _ => self.start_parts(ring, &slices, buf, done),
        }
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        check_range(self.layout.capacity(), offset, buf.len() as u64)?;
        for slice in self.layout.slices(offset, buf.len() as u64) {
            let component = &self.components[slice.component];
            if slice.len == buf.len() as u64 {
                return component.write(slice.offset, buf);
            }
            component.write(slice.offset, &copy_of(buf, slice))?;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        flush_and_wait(&unflushed(self.components.iter().enumerate())).result()
    }

    fn submit(&self, batch: Vec<Io>) {
        let mut batches: Vec<Vec<Io>> = self.components.iter().map(|_| Vec::new()).collect();
        let mut flushes = Vec::new();
        for io in batch {
            match io {
                Io::Write { offset, buf, done } => {
                    self.write_request((offset, buf, done), &mut batches)
                }
                Io::Flush { done } => flushes.push(done),
            }
        }
        for (component, batch) in
            self.components.iter().zip(batches).filter(|(_, batch)| !batch.is_empty())
        {
            component.device().submit(batch);
        }
        flushes.into_iter().for_each(|done| self.flush_request(done));
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.layout.capacity(), offset, len)?;
        let extents = self.layout.extents(offset, len);
        extents.into_iter().try_for_each(|(i, offset, len)| self.components[i].discard(offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.layout.capacity(), offset, len)?;
        let extents = self.layout.extents(offset, len);
        extents
            .into_iter()
            .try_for_each(|(i, offset, len)| self.components[i].allocate(offset, len))
    }

    fn host_free(&self) -> Option<u64> {
        host_free(self.components.iter())
    }

    fn flush_timing(&self) -> FlushTiming {
        slowest(self.components.iter())
    }

    fn reset_flush_timing(&self) {
        self.components.iter().for_each(|one| one.device().reset_flush_timing());
    }

    fn components(&self) -> Vec<ComponentStats> {
        self.components.iter().map(|one| one.stats(ComponentState::Active)).collect()
    }
}
