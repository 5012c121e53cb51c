; clang 19, sha256 of the C 32783344f40c8083
; scripts/compile_kernels.py has made this file.

%struct.index = type { ptr, ptr, ptr, ptr, i64 }

define i64 @probe(ptr %indexes, i64 %num_indexes, ptr %tags, i64 %num_tags, ptr %owners, ptr %slots, ptr %generations) {
entry:
  %cmp.not42 = icmp sgt i64 %num_tags, 0
  br i1 %cmp.not42, label %while.cond.preheader.lr.ph, label %cleanup10

while.cond.preheader.lr.ph:
  %cmp138 = icmp sgt i64 %num_indexes, 0
  br label %while.cond.preheader

while.cond.preheader:
  %i.044 = phi i64 [ 0, %while.cond.preheader.lr.ph ], [ %inc9, %for.inc ]
  %owner.043 = phi i64 [ 0, %while.cond.preheader.lr.ph ], [ %owner.137, %for.inc ]
  br i1 %cmp138, label %land.rhs.lr.ph, label %while.end

land.rhs.lr.ph:
  %arrayidx2 = getelementptr i64, ptr %tags, i64 %i.044
  %0 = load i64, ptr %arrayidx2, align 8
  %shr.i = lshr i64 %0, 32
  %and.i = and i64 %0, 127
  %1 = mul i64 %and.i, 72340172838076673
  %mul2.i = add i64 %1, -9187201950435737472
  br label %land.rhs

land.rhs:
  %asked.040 = phi i64 [ 0, %land.rhs.lr.ph ], [ %inc, %while.body ]
  %owner.139 = phi i64 [ %owner.043, %land.rhs.lr.ph ], [ %cond, %while.body ]
  %arrayidx = getelementptr %struct.index, ptr %indexes, i64 %owner.139
  %num_slots.i = getelementptr i8, ptr %arrayidx, i64 32
  %2 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %2, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %3 = load ptr, ptr %arrayidx, align 8
  %arrayidx.i = getelementptr i64, ptr %3, i64 %shr1.i
  %4 = load atomic i64, ptr %arrayidx.i monotonic, align 8
  %xor.i = xor i64 %4, %mul2.i
  %sub.i = add i64 %xor.i, -72340172838076673
  %not.i = and i64 %xor.i, -9187201950435737472
  %and3.i = xor i64 %not.i, -9187201950435737472
  %and4.i = and i64 %and3.i, %sub.i
  %tobool.not50.i = icmp eq i64 %and4.i, 0
  br i1 %tobool.not50.i, label %while.body, label %for.body.lr.ph.i

for.body.lr.ph.i:
  %cells.i = getelementptr i8, ptr %arrayidx, i64 8
  %5 = load ptr, ptr %cells.i, align 8
  %mul5.i = shl i64 %shr1.i, 3
  %generations.i = getelementptr i8, ptr %arrayidx, i64 24
  %checks.i = getelementptr i8, ptr %arrayidx, i64 16
  br label %for.body.i

for.body.i:
  %matches.051.i = phi i64 [ %and4.i, %for.body.lr.ph.i ], [ %and26.i, %for.inc.i ]
  %6 = tail call i64 @llvm.cttz.i64(i64 %matches.051.i, i1 true)
  %div48.i = lshr i64 %6, 3
  %add.i = or i64 %div48.i, %mul5.i
  %arrayidx6.i = getelementptr i32, ptr %5, i64 %add.i
  %7 = load atomic i32, ptr %arrayidx6.i monotonic, align 4
  %conv8.i = zext i32 %7 to i64
  %cmp.not.i = icmp ugt i64 %2, %conv8.i
  br i1 %cmp.not.i, label %if.end.i, label %for.inc.i

if.end.i:
  %8 = load ptr, ptr %generations.i, align 8
  %arrayidx11.i = getelementptr i64, ptr %8, i64 %conv8.i
  %9 = load atomic i64, ptr %arrayidx11.i monotonic, align 8
  %10 = load ptr, ptr %checks.i, align 8
  %arrayidx13.i = getelementptr i64, ptr %10, i64 %conv8.i
  %11 = load atomic i64, ptr %arrayidx13.i monotonic, align 8
  %cmp15.i = icmp sgt i64 %9, -1
  br i1 %cmp15.i, label %land.lhs.true.i, label %for.inc.i

land.lhs.true.i:
  %mul17.i = mul i64 %9, -7046029254386353131
  %xor18.i = xor i64 %mul17.i, %0
  %cmp19.i = icmp eq i64 %xor18.i, %11
  br i1 %cmp19.i, label %find.exit, label %for.inc.i

for.inc.i:
  %sub25.i = add i64 %matches.051.i, -1
  %and26.i = and i64 %sub25.i, %matches.051.i
  %tobool.not.i = icmp eq i64 %and26.i, 0
  br i1 %tobool.not.i, label %while.body, label %for.body.i

find.exit:
  %arrayidx3.le = getelementptr i64, ptr %slots, i64 %i.044
  %arrayidx4.le = getelementptr i64, ptr %generations, i64 %i.044
  store i64 %conv8.i, ptr %arrayidx3.le, align 8
  store i64 %9, ptr %arrayidx4.le, align 8
  br label %while.end

while.body:
  %inc = add i64 %asked.040, 1
  %add = add i64 %owner.139, 1
  %cmp5 = icmp slt i64 %add, %num_indexes
  %cond = select i1 %cmp5, i64 %add, i64 0
  %exitcond.not = icmp eq i64 %inc, %num_indexes
  br i1 %exitcond.not, label %cleanup10, label %land.rhs

while.end:
  %owner.137 = phi i64 [ %owner.139, %find.exit ], [ %owner.043, %while.cond.preheader ]
  %asked.035 = phi i64 [ %asked.040, %find.exit ], [ 0, %while.cond.preheader ]
  %cmp7.not = icmp eq i64 %asked.035, %num_indexes
  br i1 %cmp7.not, label %cleanup10, label %for.inc

for.inc:
  %arrayidx8 = getelementptr i64, ptr %owners, i64 %i.044
  store i64 %owner.137, ptr %arrayidx8, align 8
  %inc9 = add i64 %i.044, 1
  %exitcond50.not = icmp eq i64 %inc9, %num_tags
  br i1 %exitcond50.not, label %cleanup10, label %while.cond.preheader

cleanup10:
  %i.0.lcssa = phi i64 [ 0, %entry ], [ %i.044, %while.body ], [ %i.044, %while.end ], [ %num_tags, %for.inc ]
  %spec.select = tail call i64 @llvm.smin.i64(i64 %i.0.lcssa, i64 %num_tags)
  ret i64 %spec.select
}

define void @probe_each(ptr %indexes, i64 %num_indexes, ptr %tags, i64 %num_tags, ptr %owners, ptr %slots, ptr %generations) {
entry:
  %cmp30 = icmp sgt i64 %num_tags, 0
  br i1 %cmp30, label %for.body.lr.ph, label %for.cond.cleanup

for.body.lr.ph:
  %cmp228 = icmp sgt i64 %num_indexes, 0
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %i.031 = phi i64 [ 0, %for.body.lr.ph ], [ %inc9, %while.end ]
  %arrayidx = getelementptr i64, ptr %generations, i64 %i.031
  store i64 -1, ptr %arrayidx, align 8
  %arrayidx1 = getelementptr i64, ptr %slots, i64 %i.031
  store i64 -1, ptr %arrayidx1, align 8
  br i1 %cmp228, label %land.rhs.lr.ph, label %while.end

land.rhs.lr.ph:
  %arrayidx4 = getelementptr i64, ptr %tags, i64 %i.031
  %0 = load i64, ptr %arrayidx4, align 8
  %shr.i = lshr i64 %0, 32
  %and.i = and i64 %0, 127
  %1 = mul i64 %and.i, 72340172838076673
  %mul2.i = add i64 %1, -9187201950435737472
  br label %land.rhs

land.rhs:
  %owner.029 = phi i64 [ 0, %land.rhs.lr.ph ], [ %inc, %while.body ]
  %arrayidx3 = getelementptr %struct.index, ptr %indexes, i64 %owner.029
  %num_slots.i = getelementptr i8, ptr %arrayidx3, i64 32
  %2 = load i64, ptr %num_slots.i, align 8
  %mul.i = mul i64 %2, %shr.i
  %shr1.i = lshr i64 %mul.i, 32
  %3 = load ptr, ptr %arrayidx3, align 8
  %arrayidx.i = getelementptr i64, ptr %3, i64 %shr1.i
  %4 = load atomic i64, ptr %arrayidx.i monotonic, align 8
  %xor.i = xor i64 %4, %mul2.i
  %sub.i = add i64 %xor.i, -72340172838076673
  %not.i = and i64 %xor.i, -9187201950435737472
  %and3.i = xor i64 %not.i, -9187201950435737472
  %and4.i = and i64 %and3.i, %sub.i
  %tobool.not50.i = icmp eq i64 %and4.i, 0
  br i1 %tobool.not50.i, label %while.body, label %for.body.lr.ph.i

for.body.lr.ph.i:
  %cells.i = getelementptr i8, ptr %arrayidx3, i64 8
  %5 = load ptr, ptr %cells.i, align 8
  %mul5.i = shl i64 %shr1.i, 3
  %generations.i = getelementptr i8, ptr %arrayidx3, i64 24
  %checks.i = getelementptr i8, ptr %arrayidx3, i64 16
  br label %for.body.i

for.body.i:
  %matches.051.i = phi i64 [ %and4.i, %for.body.lr.ph.i ], [ %and26.i, %for.inc.i ]
  %6 = tail call i64 @llvm.cttz.i64(i64 %matches.051.i, i1 true)
  %div48.i = lshr i64 %6, 3
  %add.i = or i64 %div48.i, %mul5.i
  %arrayidx6.i = getelementptr i32, ptr %5, i64 %add.i
  %7 = load atomic i32, ptr %arrayidx6.i monotonic, align 4
  %conv8.i = zext i32 %7 to i64
  %cmp.not.i = icmp ugt i64 %2, %conv8.i
  br i1 %cmp.not.i, label %if.end.i, label %for.inc.i

if.end.i:
  %8 = load ptr, ptr %generations.i, align 8
  %arrayidx11.i = getelementptr i64, ptr %8, i64 %conv8.i
  %9 = load atomic i64, ptr %arrayidx11.i monotonic, align 8
  %10 = load ptr, ptr %checks.i, align 8
  %arrayidx13.i = getelementptr i64, ptr %10, i64 %conv8.i
  %11 = load atomic i64, ptr %arrayidx13.i monotonic, align 8
  %cmp15.i = icmp sgt i64 %9, -1
  br i1 %cmp15.i, label %land.lhs.true.i, label %for.inc.i

land.lhs.true.i:
  %mul17.i = mul i64 %9, -7046029254386353131
  %xor18.i = xor i64 %mul17.i, %0
  %cmp19.i = icmp eq i64 %xor18.i, %11
  br i1 %cmp19.i, label %find.exit, label %for.inc.i

for.inc.i:
  %sub25.i = add i64 %matches.051.i, -1
  %and26.i = and i64 %sub25.i, %matches.051.i
  %tobool.not.i = icmp eq i64 %and26.i, 0
  br i1 %tobool.not.i, label %while.body, label %for.body.i

find.exit:
  store i64 %conv8.i, ptr %arrayidx1, align 8
  store i64 %9, ptr %arrayidx, align 8
  br label %while.end

while.body:
  %inc = add i64 %owner.029, 1
  %exitcond.not = icmp eq i64 %inc, %num_indexes
  br i1 %exitcond.not, label %while.end, label %land.rhs

while.end:
  %cond = phi i64 [ %owner.029, %find.exit ], [ -1, %for.body ], [ -1, %while.body ]
  %arrayidx8 = getelementptr i64, ptr %owners, i64 %i.031
  store i64 %cond, ptr %arrayidx8, align 8
  %inc9 = add i64 %i.031, 1
  %exitcond35.not = icmp eq i64 %inc9, %num_tags
  br i1 %exitcond35.not, label %for.cond.cleanup, label %for.body
}

declare i64 @llvm.cttz.i64(i64, i1)

declare i64 @llvm.smin.i64(i64, i64)
