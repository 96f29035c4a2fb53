//! `linear` and `stripe`: every byte is on one component. What fails there fails here.

use super::component::{Component, flush_and_wait, flush_each, host_free, slowest, unflushed};
use super::gather::{Gather, Outcome};
use super::header::{COMPONENTS_MAX, ComponentHeader, Side};
use super::layout::{Layout, Slice};
use super::length::{cut, least, lengthen};
use crate::buffer::AlignedBuf;
use crate::device::{
    BlockDevice, ComponentState, ComponentStats, Io, IoDone, Longest, check_range,
};
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Several devices as one, without redundancy.
pub struct SpanDevice {
    components: Vec<Arc<Component>>,
    layout: Layout,
    capacity: AtomicU64,
    /// What each component's header says. Held while another length is written.
    headers: Mutex<Vec<ComponentHeader>>,
}

impl SpanDevice {
    /// All components of a linear or striped composite, in their order.
    ///
    /// # Panics
    /// For a mirror, for no component and for more than [`COMPONENTS_MAX`].
    pub fn open(sides: Vec<Side>) -> Self {
        assert!((1..=COMPONENTS_MAX).contains(&sides.len()), "{} components", sides.len());
        let lens: Vec<u64> = sides.iter().map(|side| side.header.len).collect();
        let layout = Layout::new(sides[0].header.kind, &lens, sides[0].header.unit);
        let (components, headers) = sides
            .into_iter()
            .map(|side| (Component::new(side.name, side.device), side.header))
            .unzip();
        let capacity = layout.capacity(&lens).into();
        Self { components, layout, capacity, headers: Mutex::new(headers) }
    }

    /// Those whose lengths may change, each with the length that it gets.
    fn with_len(&self, len: u64) -> impl Iterator<Item = (&Arc<Component>, u64)> {
        self.components[self.layout.first_to_change()..].iter().map(move |one| (one, len))
    }

    fn write_request(&self, io: (u64, Arc<AlignedBuf>, IoDone), batches: &mut [Vec<Io>]) {
        let (offset, buf, done) = io;
        if let Err(error) = check_range(self.capacity(), offset, buf.len() as u64) {
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
        self.capacity.load(Ordering::Acquire)
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        let those = &self.components[self.layout.first_to_change()..];
        Ok(least(those.iter())?.map(|len| self.layout.capacity_of(len)))
    }

    /// As [`super::length`] says. The headers are written also where nothing changes: a crash may
    /// have left two that differ, or two copies of one.
    fn resize(&self, bytes: u64) -> io::Result<()> {
        let mut headers = self.headers.lock();
        let len = self.layout.len_for(bytes);
        lengthen(self.with_len(len))?;
        let first = self.layout.first_to_change();
        let mut changed = headers.clone();
        for header in &mut changed[first..] {
            (header.len, header.generation) = (len, header.generation + 1);
        }
        for (header, written) in headers[first..].iter_mut().zip(&changed[first..]) {
            // Also where it fails: no two headers of one generation may differ.
            header.generation = written.generation;
        }
        for (one, header) in self.components.iter().zip(&changed).skip(first) {
            header.write(&**one.device())?;
        }
        let lens: Vec<u64> = changed.iter().map(|header| header.len).collect();
        self.capacity.store(self.layout.capacity(&lens), Ordering::Release);
        *headers = changed;
        cut(self.with_len(len))
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        check_range(self.capacity(), offset, buf.len() as u64)?;
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
        if let Err(error) = check_range(self.capacity(), offset, len) {
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
        check_range(self.capacity(), offset, buf.len() as u64)?;
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
        check_range(self.capacity(), offset, len)?;
        let extents = self.layout.extents(offset, len);
        extents.into_iter().try_for_each(|(i, offset, len)| self.components[i].discard(offset, len))
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        check_range(self.capacity(), offset, len)?;
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
